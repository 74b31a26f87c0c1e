"""A run's overrides as Megatron's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.studies import REPOSITORY

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import launch
from olmo_lns.study.megatron_args import expand
from olmo_lns.study.spec import Study


def _command(tmp_path: Path, overrides: dict[str, Any], file: Path | None = None) -> list[str]:
    shipped = REPOSITORY / "configs" / "study" / "paper-megatron.yaml"
    config = str(file or REPOSITORY / "configs" / "megatron" / "{size}-{arm}.yaml")
    description = yaml.safe_load(shipped.read_text()) | {"config": config, "sizes": {"60M": overrides}}
    del description["launch"]["nodes"]  # of a size that is not among these
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(description))
    study = Study.load(path)
    return launch.command(study, study.runs[0], tmp_path)


def test_values_become_the_words_that_a_file_of_flags_would(tmp_path: Path) -> None:
    overrides = {"sequence-parallel": False, "exit-interval": None, "log_throughput": True, "rope-scaling": [1, 2]}
    words = _command(tmp_path, overrides)
    start = words.index("--lns-config") + 2
    assert words[start:][:6] == ["--log-throughput", "--rope-scaling", "1", "2", "--seed", "6198"]
    assert not {"--sequence-parallel", "--exit-interval", "False", "None"} & set(words)


@pytest.mark.parametrize("value", [False, None])
def test_a_flag_of_the_file_that_cannot_be_taken_back_is_refused(
    tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DATA", "/data/text_document")
    with pytest.raises(LNSConfigError, match=rf"60M-preln-s6198: bf16: {value} cannot be .* has bf16: True. Take the"):
        _command(tmp_path, {"bf16": value})
    shipped = yaml.safe_load((REPOSITORY / "configs" / "megatron" / "60M-preln.yaml").read_text())
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(shipped | {"bf16": False}))
    words = _command(tmp_path, {"bf16": value}, tmp_path / "m.yaml")
    assert "--bf16" not in expand(words[words.index("--lns-config") :])
