"""What the demo tells its user to do next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from olmo_lns.demo import report, runs


@pytest.mark.parametrize(("arms", "folded"), [(["preln", "lns"], "lns"), (["preln"], ""), (["preln", "postln"], "")])
def test_no_export_is_offered_where_there_is_nothing_to_fold(tmp_path: Path, arms: list[str], folded: str) -> None:
    config, data = SimpleNamespace(max_duration=6), SimpleNamespace(heldout=tmp_path / "data" / "heldout.npy")
    made: list[Any] = [runs.Run(arm, 0, config, tmp_path / arm / "seed0") for arm in arms]
    offered = [line for line in report.next_commands(made, data) if " export " in line]  # type: ignore[arg-type]
    assert len(offered) == bool(folded)
    if folded:
        assert f"{folded}/seed0/step6-unsharded" in offered[0] and f"{folded}-folded" in offered[0]
