"""The one comparison: what a checkpoint's own config says, and the built model."""

import pytest

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.record import require_same
from olmo_lns.schemes import LNS, PRE_LN, parse

QUARTER = parse("lns:exponent=0.25")


def compare(saved, running, **more):
    require_same(saved, running, source="step10", setting=lambda scheme: f"--norm={scheme}", **more)


@pytest.mark.parametrize(
    ("saved", "running", "more", "said"),
    [
        (LNS, PRE_LN, {}, "step10: its config says lns, but this run has preln.*--norm=lns"),
        (PRE_LN, LNS, {}, "says preln, but this run has lns"),
        (LNS, QUARTER, {}, "says lns, but this run has lns:exponent=0.25"),
        (LNS, LNS, {"differing": "lns over default"}, "says lns over default"),
        (None, LNS, {}, "no config beside it names the scheme of its weights"),
    ],
)
def test_each_difference_stops_a_load_and_one_switch_goes_on(saved, running, more, said, monkeypatch, caplog):
    monkeypatch.delenv("OLMO_LNS_ALLOW_MISMATCH", raising=False)
    with pytest.raises(CheckpointMismatchError, match=f"{said}.*OLMO_LNS_ALLOW_MISMATCH=1"):
        compare(saved, running, **more)
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "1")
    compare(saved, running, **more)
    assert "Loading it anyway" in caplog.text


def test_what_agrees_loads_and_so_does_pre_ln_of_which_nothing_is_known(caplog):
    compare(QUARTER, QUARTER)
    compare(None, PRE_LN)
    assert not caplog.records
