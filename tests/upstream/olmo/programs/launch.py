"""A training script shaped like a user's: OLMo's own config parsing and Trainer, DDP over gloo.

Nothing in it knows of LayerNorm Scaling. Usage: ``launch.py config.yaml --key=value …``; rank 0
writes ``result.json`` into the save folder.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from olmo.config import TrainConfig
from olmo.data import build_train_dataloader
from olmo.model import OLMo
from olmo.optim import build_optimizer, build_scheduler
from olmo.torch_util import get_global_rank, get_world_size, seed_all
from olmo.train import Trainer
from olmo.util import clean_opt, prepare_cli_environment
from torch.nn.parallel import DistributedDataParallel


@dataclass
class RecordingTrainer(Trainer):
    losses: list = field(default_factory=list)
    gradients: dict = field(default_factory=dict)

    def train_step(self, batch, reduce_global_loss=True):
        metrics = super().train_step(batch, reduce_global_loss=reduce_global_loss)
        self.losses.append(metrics["train/CrossEntropyLoss"])
        # Kept now: OLMo's evaluation at the end drops them.
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        return metrics


def end_of(trainer):
    """Everything a training leaves behind, as tensors by name, in OLMo's own order."""
    model = trainer.model
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[p]}.{key}": torch.as_tensor(value)
        for p, state in trainer.optim.state.items()
        for key, value in state.items()
    }
    with torch.no_grad():
        logits = model(torch.arange(trainer.cfg.model.max_sequence_length)[None]).logits
    return {
        "logits": {"logits": logits},
        "gradients": trainer.gradients,
        "parameters": model.state_dict(),
        "optimizer": moments,
    }


def main(cfg):
    cfg.model.precision = cfg.precision
    cfg.device_train_batch_size = cfg.global_train_batch_size // get_world_size()
    cfg.device_train_grad_accum = cfg.device_train_batch_size // cfg.device_train_microbatch_size
    folder = Path(cfg.save_folder)
    if get_global_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        cfg.save(folder / "config.yaml")
    dist.barrier()
    seed_all(cfg.seed)
    loader = build_train_dataloader(cfg)
    model = OLMo(cfg.model)
    ddp = DistributedDataParallel(model, find_unused_parameters=cfg.ddp.find_unused_params)
    model.reset_parameters()
    with RecordingTrainer(
        cfg=cfg,
        model=model,
        dist_model=ddp,
        optim=build_optimizer(cfg, ddp),
        scheduler=build_scheduler(cfg),
        train_loader=loader,
        device=torch.device("cpu"),
        evaluators=[],
    ) as trainer:
        trainer.fit()
        if get_global_rank() == 0:
            scales = {name: getattr(module, "lns_scale", None) for name, module in model.named_modules()}
            result = {
                "losses": trainer.losses,
                "type": str(cfg.model.layer_norm_type),
                "scales": {name: scale for name, scale in scales.items() if scale is not None},
                "plugin": getattr(sys.modules.get("olmo_lns.integrations.olmo"), "__file__", None),
                "olmo": sys.modules["olmo"].__file__,
            }
            (folder / "result.json").write_text(json.dumps(result))
            torch.save(end_of(trainer), folder / "state.pt")


if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    dist.init_process_group("gloo")
    prepare_cli_environment()
    path, *overrides = sys.argv[1:]
    main(TrainConfig.load(path, [clean_opt(text) for text in overrides]))
    dist.destroy_process_group()
