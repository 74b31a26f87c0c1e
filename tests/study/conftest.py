"""A small synthetic study: a description and, for each run, the config and log that OLMo would leave."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_logs import olmo_log

from olmo_lns.study.launch import stamp
from olmo_lns.study.spec import Study

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Built:
    """:param path: the description. :param out: where its runs lie."""

    path: Path
    out: Path
    description: dict[str, Any]
    study: Study = field(init=False)

    def save(self) -> Path:
        self.path.write_text(yaml.safe_dump(self.description, sort_keys=False))
        self.study = Study.load(self.path)  # its runs keep the settings that OLMo resolved
        return self.path

    def finish(self, name: str, final: float, *, until: int | None = None, **changed: Any) -> Path:
        """Leave a run: the config that OLMo saves, with some keys changed, and a log up to a step."""
        run = next(run for run in self.study.runs if run.name == name)
        stamp(self.study, run, self.out)
        folder = self.out / name
        tree: dict[str, Any] = {}
        for key, value in {**run.settings, **changed, "save_folder": str(folder)}.items():
            *parents, last = key.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = list(value) if isinstance(value, tuple) else value
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        steps = run.shape.steps
        losses = {step: f"{final + 1 - step / steps:.4f}" for step in range(1, (until or steps) + 1)}
        (folder / "attempt-01.log").write_text(olmo_log(dict(losses), total=steps))
        return folder


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.npy").write_bytes(bytes(range(256)) * 64)
    for name in ("OLMO_LNS_EXPONENT", "OLMO_LNS_SCALED_INIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(os.environ, "OLMO_DATA_DIR", str(data))
    monkeypatch.setitem(os.environ, "OLMO_SAVE_DIR", str(tmp_path / "out"))
    steps = {"max_duration": 20, "scheduler.t_warmup": 2}
    description = {
        "name": "synthetic",
        "config": str(REPOSITORY / "configs" / "study" / "tiny-base.yaml"),
        "sizes": {
            "a": {"model.n_layers": 2, "model.d_model": 48, **steps},
            "b": {"model.n_layers": 4, "model.d_model": 96, **steps},
        },
        "arms": ["preln", "lns"],
        "seeds": [1],
        "more_seeds": {"a": [2]},
        "final_fraction": 0.1,
    }
    result = Built(tmp_path / "study.yaml", tmp_path / "out", description)
    result.save()
    return result
