from __future__ import annotations

import json

import pytest

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.record import RECORD_FILE, LNSRecord, check_match

PRE_LN = LNSRecord()
LNS = LNSRecord.lns("lns_rms")
FOLDED = LNSRecord.lns("lns_rms", folded=True)


def test_round_trip(tmp_path):
    record = LNSRecord.lns("lns_default", 0.25, scaled_init="keep")
    record.write(tmp_path)
    assert LNSRecord.read(tmp_path) == record
    assert [p.name for p in tmp_path.iterdir()] == [RECORD_FILE]


def test_absent_record_is_none(tmp_path):
    assert LNSRecord.read(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"type": "lns_rms"}', "found keys .'type'., expected"),
        (json.dumps({**LNS.as_dict(), "exponent": "0.5"}), "'exponent' must be a float, found '0.5'"),
    ],
)
def test_damaged_records_are_refused(tmp_path, text, message):
    (tmp_path / RECORD_FILE).write_text(text)
    with pytest.raises(CheckpointMismatchError, match=message):
        LNSRecord.read(tmp_path)


@pytest.mark.parametrize(
    ("saved", "running", "difference"),
    [
        (LNS, PRE_LN, "lns-to-preln"),
        (PRE_LN, LNS, "preln-to-lns"),
        (FOLDED, LNS, "folded-to-lns"),
        (FOLDED, PRE_LN, "folded-to-preln"),
        (LNS, LNSRecord.lns("lns_rms", 0.25), "exponent"),
        (LNS, LNSRecord.lns("lns_default"), "norm"),
        (LNS, LNSRecord.lns("lns_rms", scaled_init="keep"), "scaled-init"),
        (PRE_LN, LNSRecord(scaled_init="off"), "scaled-init"),
    ],
)
def test_each_difference_stops_and_has_its_own_override(monkeypatch, saved, running, difference):
    monkeypatch.delenv("OLMO_LNS_ALLOW_MISMATCH", raising=False)
    with pytest.raises(CheckpointMismatchError, match=f"OLMO_LNS_ALLOW_MISMATCH={difference} ") as caught:
        check_match(saved, running, source="runs/step10")
    message = str(caught.value)
    assert message.startswith("runs/step10 was saved with ") and "but this run has" in message
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", difference)
    assert check_match(saved, running, source="runs/step10") == [difference]


@pytest.mark.parametrize("record", [PRE_LN, LNS, LNSRecord.lns("lns_rms", 0.3, scaled_init="keep")])
def test_equal_records_match_whatever_version_wrote_them(record):
    other = LNSRecord(**{**record.as_dict(), "plugin_version": "9.9"})
    assert check_match(other, record, source="x") == []


def test_both_values_are_named():
    with pytest.raises(CheckpointMismatchError, match=r"exponent 0.5.*exponent 0.25"):
        check_match(LNS, LNSRecord.lns("lns_rms", 0.25), source="x", allow="")


def test_an_override_for_one_difference_does_not_allow_another():
    with pytest.raises(CheckpointMismatchError, match="exponent"):
        check_match(LNS, LNSRecord.lns("lns_rms", 0.25, scaled_init="keep"), source="x", allow="scaled-init")


def test_unknown_override_names_are_refused():
    with pytest.raises(CheckpointMismatchError, match="names .'everything'.; known"):
        check_match(LNS, LNS, source="x", allow="everything")


def test_evaluation_accepts_folded_weights_and_other_initialization():
    assert check_match(FOLDED, PRE_LN, source="x", training=False) == []
    assert check_match(LNS, LNSRecord.lns("lns_rms", scaled_init="keep"), source="x", training=False) == []
    with pytest.raises(CheckpointMismatchError):
        check_match(LNS, PRE_LN, source="x", training=False, allow="")
