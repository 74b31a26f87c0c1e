"""A run's overrides as Megatron's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.studies import REPOSITORY

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli
from olmo_lns.study.engines.megatron_args import expand
from olmo_lns.study.launch import start as launch
from olmo_lns.study.plan import cost
from olmo_lns.study.plan.spec import Study


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


@pytest.mark.parametrize(
    ("time", "hours"),
    [
        ("90", 1.5),
        ("90:00", 1.5),
        ("1:30:00", 1.5),
        ("2-0", 48),
        ("1-12:30", 36.5),
        ("1-0:0:36", 24.01),
    ],
)
def test_slurm_s_times(time: str, hours: float) -> None:
    assert cost.time_note("7B", hours * 0.99, time) is None
    said = cost.time_note("7B", hours * 1.99, time, "H100")
    assert said and f"h on H100s by the plan, --time is {time}: about 2 jobs one after" in said
    assert cost.time_note("7B", 1e9, "UNLIMITED") is None


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


def test_the_printed_command_and_the_slurm_script_set_what_megatron_asserts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_gpt.py").touch()
    words = [
        "launch",
        str(REPOSITORY / "configs" / "study" / "paper-megatron.yaml"),
        "--out",
        "runs",
        "--slurm",
        "jobs",
    ]
    assert cli.main(words) == 0
    line = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    assert [size for size in ("1B", "7B") if line in Path(f"jobs/{size}.sbatch").read_text()] == ["7B"]
    lines = Path("jobs/7B.sbatch").read_text().splitlines()
    assert {"#SBATCH --cpus-per-task=64", "#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --time=76:00:00"} <= {
        *lines
    }
    assert "by the plan" not in capsys.readouterr().out and cli.main([*words, "--time", "1-00:00:00"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "by the plan" in line]
    wanted = "7B: a run takes about 75.3 h on A100s by the plan, --time is 1-00:00:00: about 4 jobs one after the other"
    assert len(said) == 2 and said[1].startswith(wanted)
    description = yaml.safe_load(Path(words[1]).read_text()) | {"sizes": ["7B"], "launch": {"nproc": 8}}
    description["config"] = str(REPOSITORY / "configs" / "megatron" / "{size}-{arm}.yaml")
    Path("one.yaml").write_text(yaml.safe_dump(description))
    capsys.readouterr()
    assert cli.main(["launch", "one.yaml", "--out", "runs"]) == 0
    assert capsys.readouterr().out.count("\nCUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 ") == 3
