"""Runs what this package wraps in OLMo, on inputs of every kind. Usage: ``stock.py FOLDER``."""

import functools
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support import launch, observing
from support.olmo_models import TINY, model_config, tokens

folder = Path(sys.argv[1])
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", FS_LOCAL_RANK="0", NODE_RANK="0")
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)

from olmo.checkpoint import FullCheckpointer  # noqa: E402
from olmo.config import ModelConfig, ShardedCheckpointerType, TrainConfig  # noqa: E402
from olmo.data import build_train_dataloader  # noqa: E402
from olmo.model import OLMo  # noqa: E402
from olmo.optim import build_optimizer, build_scheduler  # noqa: E402
from olmo.train import Trainer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

partial = functools.partial
CPU = torch.device("cpu")


# --- models ---------------------------------------------------------------------------------------------------------------


def built(**changes):
    model = OLMo(model_config(**changes))
    meta = changes.get("init_device") == "meta"
    return model, None if meta else model(tokens()).logits


def drawn(**changes):
    """Draw the weights again: from the meta device, or of a model whose weights were changed."""
    model = OLMo(model_config(**changes))
    if changes.get("init_device") == "meta":
        model.to_empty(device="cpu")
    model.reset_parameters()
    return model


MODELS = {
    "rms": dict(layer_norm_type="rms"),
    "default": dict(layer_norm_type="default"),
    "low_precision with biases": dict(layer_norm_type="low_precision", include_bias=True, bias_for_layer_norm=True),
    "norm_after": dict(layer_norm_type="rms", norm_after=True),
    "mitchell": dict(init_fn="mitchell"),
    "full_megatron": dict(init_fn="full_megatron"),
    "kaiming_normal": dict(init_fn="kaiming_normal"),
    "fan_in": dict(init_fn="fan_in"),
    "sequential blocks in groups": dict(block_group_size=2),
    "llama blocks": dict(block_type="llama"),
    "tied, ALiBi, multi-query": dict(weight_tying=True, alibi=True, rope=False, multi_query_attention=True),
    "meta": dict(init_device="meta"),
    "an unknown norm": dict(layer_norm_type="none"),
    "an unknown initialization": dict(init_fn="none"),
    "impossible heads": dict(n_heads=5),
}

# --- configs --------------------------------------------------------------------------------------------------------------


def config_files():
    written = launch.write_config(folder / "configs")
    text = written.read_text()
    texts = {
        "good": text,
        "legacy": text.replace("distributed_strategy: ddp", "reduce_global_loss: true\nfsdp:\n  use_orig_params: true"),
        "an unknown key": text + "\nno_such_key: 1\n",
        "an unknown norm": text.replace("  d_model:", "  layer_norm_type: none\n  d_model:"),
        "cut": text[: len(text) // 2] + "\n  - [",
        "empty": "",
    }
    for name, each in texts.items():
        (folder / "configs" / f"{name}.yaml").write_text(each)
    return [*texts, "missing"]


def loaded(name, *args, kind=TrainConfig, **options):
    return kind.load(folder / "configs" / f"{name}.yaml", *args, **options)


# --- checkpoints ----------------------------------------------------------------------------------------------------------


class Running(Trainer):
    """OLMo's Trainer without data."""

    def __init__(self):
        self.cfg = TrainConfig.new(model={**TINY, "layer_norm_type": "rms"}, save_folder=str(folder))
        torch.manual_seed(7)
        self.model = OLMo(self.cfg.model)
        self.dist_model, self.optim = DistributedDataParallel(self.model), torch.optim.AdamW(self.model.parameters())
        self.state = None

    def load_trainer_state_dict(self, state):
        self.state = state


def checkpoints():
    """OLMo saves one, and it is copied and changed."""
    good = folder / "good"
    running = Running()
    (running.model(tokens()).logits.sum()).backward()
    running.optim.step()
    FullCheckpointer(running.cfg).save_checkpoint(good, running.dist_model, running.optim, {"global_step": 3})

    def copy(name):
        return Path(shutil.copytree(good, folder / name))

    (copy("no config") / "config.yaml").unlink()
    (copy("damaged config") / "config.yaml").write_text("model: [")
    (copy("config without model") / "config.yaml").write_text("seed: 3")
    (copy("config of a later version") / "config.yaml").write_text("model: {layer_norm_type: new_norm, later: 1}")
    (copy("damaged weights") / "model.pt").write_bytes((good / "model.pt").read_bytes()[:1000])
    (copy("no weights") / "model.pt").unlink()
    (copy("no optimizer") / "optim.pt").unlink()
    legacy = copy("legacy")
    (legacy / "train.pt").rename(legacy / "other.pt")
    sharded = copy("sharded")
    for name in ("model", "optim"):
        (sharded / name).mkdir()
        (sharded / f"{name}.pt").unlink()
    (sharded / "train").mkdir()
    (sharded / "train.pt").rename(sharded / "train" / "rank0.pt")
    (folder / "empty").mkdir()
    return [path.name for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "configs"] + ["missing"]


def restored(kind, name, *args, **options):
    running = Running()
    getattr(running, f"restore_{kind}_checkpoint")(folder / name, *args, **options)
    return running.model, running.optim.state_dict(), running.state


# --- training -------------------------------------------------------------------------------------------------------------


def trained(break_data=False, **changes):
    path = launch.write_config(folder / "fit", **{"model.layer_norm_type": "rms", **changes})
    cfg = TrainConfig.load(path)
    cfg.model.precision = cfg.precision
    cfg.device_train_batch_size, cfg.device_train_grad_accum = cfg.global_train_batch_size, 2
    Path(cfg.save_folder).mkdir(parents=True, exist_ok=True)
    model = OLMo(cfg.model)
    ddp = DistributedDataParallel(model)
    loader = [] if break_data else build_train_dataloader(cfg)
    parts = dict(optim=build_optimizer(cfg, ddp), scheduler=build_scheduler(cfg), train_loader=loader, evaluators=[])
    with Trainer(cfg=cfg, model=model, dist_model=ddp, device=CPU, **parts) as trainer:
        trainer.fit()
    return model, trainer.global_step


FUNCTIONS = {
    "OLMo": OLMo.__init__,
    "reset_parameters": OLMo.reset_parameters,
    "load": TrainConfig.load,
    "restore_unsharded_checkpoint": Trainer.restore_unsharded_checkpoint,
    "restore_sharded_checkpoint": Trainer.restore_sharded_checkpoint,
    "fit": Trainer.fit,
}
cases = {f"OLMo: {name}": partial(built, **changes) for name, changes in MODELS.items()}
cases |= {f"reset_parameters: {name}": partial(drawn, **changes) for name, changes in MODELS.items()}
cases |= {f"load: {name}": partial(loaded, name) for name in config_files()}
cases |= {
    "OLMo: no config": lambda: OLMo(),
    "OLMo: without initialization": lambda: OLMo(model_config(), init_params=False).config,
    "OLMo: a wrong argument": lambda: OLMo(model_config(), no_such=1),
    "reset_parameters: a wrong argument": lambda: OLMo(model_config()).reset_parameters(1),
    "load: overrides": partial(loaded, "good", ["model.n_layers=3", "seed=5", "model.layer_norm_type=low_precision"]),
    "load: overrides of an iterator": lambda: loaded("good", iter(["model.n_layers=3", "seed=5"])),
    "load: a wrong override": partial(loaded, "good", ["model.no_such=3"]),
    "load: an override that is no text": partial(loaded, "good", [3]),
    "load: a part": partial(loaded, "good", key="model", kind=ModelConfig),
    "load: a part and overrides": partial(loaded, "good", ["n_layers=3"], "model", kind=ModelConfig),
    "load: a missing part": partial(loaded, "good", key="no_such", kind=ModelConfig),
    "load: no path": lambda: TrainConfig.load(),
    "load: no validation": partial(loaded, "good", validate_paths=False),
    "fit: two steps": partial(trained, max_duration=2, stop_at=2),
    "fit: stop_after": partial(trained, stop_after=1),
    "fit: no data": partial(trained, break_data=True),
    "fit: a wrong argument": lambda: Running().fit(1),
}  # fmt: skip
for name in checkpoints():
    cases[f"restore_unsharded_checkpoint: {name}"] = partial(restored, "unsharded", name)
    for checkpointer in ShardedCheckpointerType:
        label = f"restore_sharded_checkpoint: {name}, {checkpointer}"
        cases[label] = partial(restored, "sharded", name, sharded_checkpointer=checkpointer)
cases["restore_unsharded_checkpoint: weights alone"] = partial(
    restored, "unsharded", "no optimizer", load_optimizer_state=False, load_trainer_state=False
)
cases["restore_unsharded_checkpoint: a local cache"] = partial(restored, "unsharded", "missing", folder / "good")
observing.main(cases, FUNCTIONS, folder, "olmo")
