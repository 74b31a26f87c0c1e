"""The demo's study: the description of the config pack, with the sizes, arms and seeds that were asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import yaml

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import config_pack
from olmo_lns.study.arms import ARMS, arm_named, settings_of
from olmo_lns.study.engines import OLMO
from olmo_lns.study.spec import Run, Study

if TYPE_CHECKING:
    from olmo_lns.study.text import Text

__all__ = ["Shape", "base", "default_arms", "make_study", "parse_arms", "train_config"]

#: Of the config pack.
_STUDY = "study/demo.yaml"


@cache
def _description() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((config_pack.folder() / _STUDY).read_text(encoding="utf-8"))
    return found


@cache
def base() -> dict[str, Any]:
    """The OLMo config that every run starts from, as the pack has it."""
    path = config_pack.folder() / Path(_STUDY).with_name(_description()["config"])
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def default_arms() -> list[str]:
    """Each differs from ``preln`` in one thing; the other arms on request."""
    return list(_description()["arms"])


@dataclass(frozen=True)
class Shape:
    """Size of model and run, peak rate and init std. Lengths in tokens, ``batch`` in sequences."""

    layers: int
    d_model: int
    heads: int
    sequence: int
    batch: int
    learning_rate: float
    init_std: float

    @classmethod
    def default(cls) -> Shape:
        """The demo's own, from the pack."""
        config, model = base(), base()["model"]
        size = (model["n_layers"], model["d_model"], model["n_heads"], model["max_sequence_length"])
        rate = config["optimizer"]["learning_rate"]
        return cls(*size, config["global_train_batch_size"], rate, model["init_std"])

    def overrides(self, steps: int) -> dict[str, Any]:
        """Of the base config; what follows from a length goes with it."""
        return {
            "model.n_layers": self.layers,
            "model.d_model": self.d_model,
            "model.mlp_hidden_size": 4 * self.d_model,
            "model.max_sequence_length": self.sequence,
            "model.init_std": self.init_std,
            "optimizer.learning_rate": self.learning_rate,
            "global_train_batch_size": self.batch,
            "max_duration": steps,
            "scheduler.t_warmup": max(1, steps // 10),
            "save_interval_unsharded": max(1, steps // 6),
        }


def parse_arms(text: str) -> list[str]:
    """Names from a comma-separated list, in its order.

    :raises LNSConfigError: an unknown name, with the nearest known one; an arm that OLMo lacks; an empty list.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        settings_of(arm_named(name), OLMO)
    if not names:
        raise LNSConfigError(f"no arm given. Known: {', '.join(ARMS)}")
    return names


def make_study(path: Path, arms: Sequence[str], seeds: Sequence[int], steps: int, shape: Shape) -> Study:
    """Write the description of what was asked for to ``path``, and read it as every study is."""
    config = config_pack.folder() / Path(_STUDY).with_name(_description()["config"])
    asked = {"config": str(config), "sizes": {"demo": shape.overrides(steps)}, "arms": [*arms], "seeds": [*seeds]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(_description() | asked, sort_keys=False), encoding="utf-8")
    return Study.load(path)


def train_config(run: Run, data: Text, folder: Path) -> Any:
    """OLMo's ``TrainConfig`` of one run, in the demo's own folder for it."""
    config = run.loaded
    config.run_name = f"demo-{run.arm}-seed{run.seed}-data-{data.digest[:12]}"
    config.data.paths = [str(data.train)]
    config.evaluators[0].data.paths = [str(data.heldout)]
    config.tokenizer.identifier = str(data.tokenizer)
    config.save_folder = str(folder)
    return config
