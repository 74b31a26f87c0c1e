"""A small synthetic study: a description and, for each run, the config and log that OLMo would leave."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from olmo_lns.study.describe import Study

REPOSITORY = Path(__file__).resolve().parents[2]

OLMO = """2026-01-01 10:00:00.000	host:0	olmo.train:967	INFO	[step={step}/{total},epoch=0]
    optim/total_grad_norm=1.0000
    train/CrossEntropyLoss={loss}
    train/Perplexity=12.3
    throughput/total_tokens=1,024
"""
MEGATRON = (
    " [2026-01-01 10:00:00] iteration {step:8d}/{total:8d} | consumed samples: 256 | elapsed time per iteration (ms): 1.0 "
    "| learning rate: 6.0E-04 | global batch size: 256 | lm loss: {loss} | loss scale: 1.0 | grad norm: 1.0 | "
    "number of skipped iterations: 0 | number of nan iterations: 0 |\n"
)


def olmo_log(losses, total=10):
    """Return a log as OLMo prints it; a loss that is text is taken as it is."""
    return "".join(
        OLMO.format(step=step, total=total, loss=loss if isinstance(loss, str) else f"{loss:#.4g}")
        for step, loss in losses.items()
    )


def megatron_log(losses, total=100):
    """Return a log as Megatron prints it; a loss that is text is taken as it is."""
    return "".join(
        MEGATRON.format(step=step, total=total, loss=loss if isinstance(loss, str) else f"{loss:.6E}")
        for step, loss in losses.items()
    )


@dataclass
class Built:
    """:param path: the description. :param out: the folder of its runs."""

    path: Path
    out: Path
    description: dict[str, Any]
    study: Study = field(init=False)

    def save(self):
        self.path.write_text(yaml.safe_dump(self.description, sort_keys=False))
        self.study = Study.load(self.path)  # its runs keep the settings that OLMo resolved
        return self.path

    def finish(self, name, final, *, until=None, **changed):
        """Write a run: the config that OLMo saves, with the ``changed`` keys, and a log up to step ``until``."""
        from omegaconf import OmegaConf

        run = next(run for run in self.study.runs if run.name == name)
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        saved = OmegaConf.create()
        for key, value in {**run.settings, **changed, "save_folder": str(folder)}.items():
            OmegaConf.update(saved, key, value)
        OmegaConf.save(saved, folder / "config.yaml")
        steps = run.workload.steps
        losses = {step: f"{final + 1 - step / steps:.4f}" for step in range(1, (until or steps) + 1)}
        (folder / "attempt-01.log").write_text(olmo_log(dict(losses), total=steps))
        return folder
