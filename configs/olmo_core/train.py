"""Train a config file of OLMo-core, as OLMo-core's own train scripts do. The files beside this script are such configs.

    export OLMO_DATA_DIR=/path/to/memmaps OLMO_SAVE_DIR=/path/to/runs      # docs/data.md makes the memmaps
    torchrun --nproc-per-node=8 configs/olmo_core/train.py configs/olmo_core/60M-lns.yaml [OVERRIDES…]
    torchrun --nproc-per-node=8 configs/olmo_core/train.py configs/olmo_core/60M-preln.yaml --dry-run

Overrides are OLMo-core's, such as ``--train_module.optim.lr=3e-4 --model.block.exponent=0.25``. The same command
resumes a run. A ``config.json`` that such a run has saved is a config file, too.

Overrides also make arms that have no file. For OLMo 2's order of norms add ``--model.block.name=reordered_norm`` to a
``preln`` file, and for Peri-LN ``--model.block.name=peri_norm``. For OLMo 2's order with the factor add
``--model.block.name=reordered_norm --model.block.scheme=branchln_depth`` to an ``lns`` file.
"""

from __future__ import annotations

import argparse
import glob
import os
from dataclasses import dataclass
from typing import cast

import rich

try:
    from olmo_core.config import Config
except ModuleNotFoundError as error:
    raise SystemExit(
        f"OLMo-core could not be imported: {error}. This script needs OLMo-core 2.5 or later. Run in the folder "
        "of the clone of olmo-lns: pip install './olmo-lns[olmo-core]'"
    ) from None
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig
from olmo_core.nn.transformer import Transformer, TransformerConfig
from olmo_core.train import TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import ConfigSaverCallback, LMEvaluatorCallbackConfig
from olmo_core.train.train_module import TransformerTrainModuleConfig
from olmo_core.utils import prepare_cli_environment, seed_all
from torch import cuda

from olmo_lns.study.engines.olmo_core import read


@dataclass
class ExperimentConfig(Config):
    """The config of a run; saved as config.json in each of its checkpoints."""

    model: TransformerConfig
    dataset: NumpyFSLDatasetConfig
    data_loader: NumpyDataLoaderConfig
    train_module: TransformerTrainModuleConfig
    trainer: TrainerConfig
    init_seed: int = 6198
    residual_init: str = "plain"
    """``scaled``: attention's and the feed-forward's output projections times 1/sqrt(2 L), as Megatron draws them."""


def label_heldout(config: ExperimentConfig) -> None:
    """OLMo-core wants a label of each held-out file: ``heldout`` for all, so that there is one loss."""
    for callback in config.trainer.callbacks.values():
        if isinstance(callback, LMEvaluatorCallbackConfig):
            data = callback.eval_dataset
            data.paths = [path for pattern in data.paths or [] for path in sorted(glob.glob(pattern)) or [pattern]]
            data.metadata = [{"label": "heldout"}] * len(data.paths)


def scale_residual_outputs(model: Transformer) -> None:
    """To be called on drawn weights: scaled after the draw, so that all others are those of ``plain``."""
    for block in model.blocks.values():
        for projection in (block.attention.w_out, block.feed_forward.w2):
            projection.weight.data.mul_((2 * model.n_layers) ** -0.5)


def train(config: ExperimentConfig) -> None:
    """Build and fit."""
    seed_all(config.init_seed)
    label_heldout(config)
    model = config.model.build(init_device="meta")
    train_module = config.train_module.build(model)
    if config.residual_init not in ("plain", "scaled"):
        raise SystemExit(f"residual_init={config.residual_init}: expected plain or scaled")
    if config.residual_init == "scaled":
        scale_residual_outputs(model)
    dataset = config.dataset.build()
    data_loader = config.data_loader.build(dataset, dp_process_group=train_module.dp_process_group)
    trainer = config.trainer.build(train_module, data_loader)
    cast(ConfigSaverCallback, trainer.callbacks["config_saver"]).config = config.as_config_dict()
    trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a YAML file of the pack, or a config.json")
    parser.add_argument("--dry-run", action="store_true", help="print the config and exit")
    arguments, overrides = parser.parse_known_args()
    config = ExperimentConfig.from_dict(read(arguments.config), overrides)
    if arguments.dry_run:
        rich.print(config)
        return
    if "WORLD_SIZE" not in os.environ:  # one process without torchrun
        prepare_cli_environment()
        train(config)
        return
    prepare_training_environment(backend="cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo")
    train(config)
    teardown_training_environment()


if __name__ == "__main__":
    main()
