"""A training script shaped like a user's: OLMo's own config parsing and Trainer, DDP over gloo.

It does not mention LayerNorm Scaling. Usage: ``launch.py config.yaml --key=value … config.yaml …`` trains one run after
the other; of each, rank 0 writes ``result.json`` and every tensor at the end, ``state.pt``, into the save folder (OLMo 0.6.0 saves no checkpoint without CUDA).
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from olmo.config import TrainConfig
from olmo.data import build_train_dataloader
from olmo.model import OLMo
from olmo.optim import build_optimizer, build_scheduler
from olmo.torch_util import get_global_rank, get_world_size, seed_all
from olmo.train import Trainer
from olmo.util import clean_opt, prepare_cli_environment
from torch.nn.parallel import DistributedDataParallel


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
    loader, model = build_train_dataloader(cfg), OLMo(cfg.model)
    ddp = DistributedDataParallel(model, find_unused_parameters=cfg.ddp.find_unused_params)
    model.reset_parameters()
    parts = dict(optim=build_optimizer(cfg, ddp), scheduler=build_scheduler(cfg), train_loader=loader, evaluators=[])
    with Trainer(cfg=cfg, model=model, dist_model=ddp, device=torch.device("cpu"), **parts) as trainer:
        trainer.fit()
    if get_global_rank() == 0:
        state = dict(model.state_dict())
        for number, moments in trainer.optim.state_dict()["state"].items():
            state |= {f"{number}/{name}": torch.as_tensor(value) for name, value in moments.items()}
        torch.save(state, folder / "state.pt")
        scales = {name: module.lns_scale for name, module in model.named_modules() if hasattr(module, "lns_scale")}
        plugin = getattr(sys.modules.get("olmo_lns.integrations.olmo"), "__file__", None)
        (folder / "result.json").write_text(json.dumps({"scales": scales, "plugin": plugin}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    prepare_cli_environment()
    runs = []
    for word in sys.argv[1:]:
        if word.startswith("--"):
            runs[-1][1].append(clean_opt(word))
        else:
            runs.append((word, []))
    for path, overrides in runs:
        main(TrainConfig.load(path, overrides))
    dist.destroy_process_group()
