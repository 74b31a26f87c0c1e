import json
from dataclasses import replace

import pytest

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.record import RECORD_FILE, Record, check_match
from olmo_lns.schemes import parse


def lns(parameters="", norm="rms", scaled_init="plain", **more):
    return Record(parse(f"lns:{parameters}" if parameters else "lns"), norm, scaled_init, **more)


PRE_LN = Record()
LNS = lns()
FOLDED = lns(folded=True)
WRITTEN = LNS.as_dict()


def test_a_written_record_is_read_back(tmp_path):
    record = lns("exponent=0.25", "default", "upstream")
    assert Record.read(tmp_path) is None
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    assert [p.name for p in tmp_path.iterdir()] == [RECORD_FILE]


def test_the_file_is_flat_and_holds_every_parameter(tmp_path):
    values = json.loads(LNS.write(tmp_path).read_text())
    assert values.pop("plugin_version")
    assert values == {
        "format": 1,
        "scheme": "lns",
        "parameters": {"exponent": 0.5},
        "norm": "rms",
        "scaled_init": "plain",
        "folded": False,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        (
            '{"format": 1, "scheme": "lns"}',
            "not a record of format 1,.*found format 1 and keys .'format', 'scheme'., expected",
        ),
        (json.dumps({**WRITTEN, "more": 1}), "and keys .*'more'.*Upgrade olmo-lns"),
        (json.dumps({**WRITTEN, "parameters": {"exponent": "0.5"}}), "'exponent' must be a float, found '0.5'"),
        (json.dumps({**WRITTEN, "parameters": {"exponent": True}}), "exponent: expected a finite number, found True"),
        (json.dumps({**WRITTEN, "parameters": {"exponent": -1}}), "exponent: exponent must be a finite number >= 0"),
        (json.dumps({**WRITTEN, "parameters": {"exponent": float("nan")}}), "a finite number, found nan"),
        (json.dumps({**WRITTEN, "parameters": {"exponent": 10**400}}), "a finite number, found 1000"),
        (json.dumps({**WRITTEN, "parameters": {}}), "'exponent' must be a float, found none"),
        (json.dumps({**WRITTEN, "parameters": {"exponant": 0.5}}), "unknown parameter 'exponant' .did you mean 'expo"),
        (json.dumps({**WRITTEN, "parameters": [0.5]}), "'parameters' must be a dict, found .0.5."),
        (json.dumps({**WRITTEN, "scheme": "lsn"}), "unknown scheme 'lsn' .did you mean 'lns'"),
        (json.dumps({**WRITTEN, "folded": 1}), "'folded' must be a bool, found 1"),
        (json.dumps({**WRITTEN, "scaled_init": "off"}), "scaled_init 'off': expected one of plain, scaled"),
        (json.dumps({**WRITTEN, "format": True}), "not a record of format 1"),
        (json.dumps({"format": 7, "whatever": 1}), "not a record of format 1,.*found format 7.*Upgrade"),
        (json.dumps({"type": "lns_rms", "exponent": 0.5}), r"found format None.*before 0\.2 did .'type' is 'scheme'"),
        (b"\xff\xfe\x00", "not valid JSON"),
    ],
)
def test_damaged_records_are_refused(tmp_path, text, message):
    (tmp_path / RECORD_FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointMismatchError, match=message):
        Record.read(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="cannot be read"):
        Record.from_json(tmp_path)


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("place", ["whole", "format", "norm", "exponent"])
def test_deeply_nested_json_is_one_short_error(tmp_path, depth, place):
    nested = "[" * depth + "]" * depth
    values = {**WRITTEN, "parameters": {"exponent": "@exponent"}, "format": "@format", "norm": "@norm"}
    text = json.dumps(values) if place != "whole" else '"@whole"'
    text = text.replace(f'"@{place}"', nested).replace('"@exponent"', "0.5").replace('"@format"', "1")
    (tmp_path / RECORD_FILE).write_text(text)
    with pytest.raises(CheckpointMismatchError) as caught:
        Record.read(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("saved", "running", "difference"),
    [
        (LNS, PRE_LN, "lns-to-preln"),
        (PRE_LN, LNS, "preln-to-lns"),
        (FOLDED, LNS, "folded-to-lns"),
        (LNS, lns("exponent=0.25"), "exponent"),
        (LNS, lns(norm="default"), "norm"),
    ],
)
def test_each_difference_stops_a_load_and_has_its_own_override(monkeypatch, saved, running, difference):
    monkeypatch.delenv("OLMO_LNS_ALLOW_MISMATCH", raising=False)
    with pytest.raises(CheckpointMismatchError, match=f"OLMO_LNS_ALLOW_MISMATCH={difference} ") as caught:
        check_match(saved, running, source="runs/step10")
    message = str(caught.value)
    assert message.startswith("runs/step10 was saved with ") and "but this run has" in message
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", difference)
    assert check_match(saved, running, source="runs/step10") == [difference]


@pytest.mark.parametrize("record", [PRE_LN, LNS, lns("exponent=0.3", scaled_init="upstream")])
def test_initialization_version_and_a_fold_do_not_stop_a_load(record):
    assert check_match(record, replace(record, scaled_init="depth_scaled", plugin_version="9.9"), source="x") == []
    assert check_match(replace(record, folded=True), Record(), source="x") == []


def test_an_override_for_one_difference_does_not_allow_another():
    with pytest.raises(CheckpointMismatchError, match=r"lns:exponent=0.5 over rms .*lns:exponent=0.25 over rms"):
        check_match(LNS, lns("exponent=0.25", scaled_init="upstream"), source="x", allow="scaled-init")
    with pytest.raises(CheckpointMismatchError, match="lns-to-preln"):
        check_match(LNS, PRE_LN, source="x", allow="exponent")


@pytest.mark.parametrize("name", ["everything", "lns-to-nothing", "Exponent"])
def test_unknown_override_names_are_refused(name):
    with pytest.raises(CheckpointMismatchError, match=f"names .'{name}'.; known"):
        check_match(LNS, LNS, source="x", allow=name)
