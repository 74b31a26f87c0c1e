"""Runs what this package wraps in torchtitan, on inputs of every kind. Usage: ``stock.py FOLDER``."""

import functools
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from support import observing, torchtitan_launch

folder = Path(sys.argv[1])
sys.path.insert(0, str(torchtitan_launch.SUPPORT / "torchtitan_site"))
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401  # torchtitan on a CPU

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NGPU": "1"}
time.sleep = lambda seconds: None  # the trainer waits for other processes

from support import torchtitan_models as titan  # noqa: E402
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

partial = functools.partial
MODELS = {
    "llama3": "debugmodel",
    "qwen3": "debugmodel",
    "qwen3_moe": "debugmodel_moe",
    "deepseek_v3": "debugmodel",
    "gpt_oss": "debugmodel",
    "kimi_k2_7": "debugmodel",
    "muse_glimmer": "debugmodel",
    "qwen3_5": "debugmodel",
}


def spec(name):
    return titan.config(name.removesuffix("_moe"), MODELS[name])


def built(name, *imports, device="meta", **changes):
    config = spec(name)
    for attribute, value in changes.items():
        setattr(config.model, attribute, value)
    titan.apply_overrides(titan.OverrideConfig(imports=list(imports)), config)
    with torch.device(device):
        return config.model.build()


def without(name, norm):
    config = spec(name)
    delattr(config.model.layers[1], norm)
    return config.model.build()


def drawn(name, **options):
    model = built(name)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(**options)
    return model


# --- trainers and checkpoints ---------------------------------------------------------------------------------------------


def trainer(name, *options):
    """A trainer of the debug model, as ``torchtitan.train`` builds it, that saves in ``folder / name``."""
    os.chdir(folder)
    options = [*torchtitan_launch.OPTIONS, "--comm.mode", "fake_backend", "--dump_folder", str(folder / name), *options]
    return ConfigManager().parse_args(options).build()


def state(trainer):
    parameters = trainer.model_parts[0].named_parameters()
    return trainer.step, {name: getattr(p, "to_local", lambda p=p: p)() for name, p in parameters}


def with_trainer(use, name, *options):
    """The result of ``use`` for a trainer, which is closed at the end."""
    running = trainer(name, *options)
    try:
        return use(running)
    finally:
        running.close()
        torch.distributed.destroy_process_group()


def trained(name, *options):
    return with_trainer(lambda running: (running.train(), state(running)), name, *options)


SAVE = ("--checkpoint.enable", "--checkpoint.interval", "1")
RESUME = ("--checkpoint.enable", "--training.steps", "3")


def checkpoints():
    """torchtitan saves one, and it is copied and damaged. Returns the names of their folders."""
    trained("good", *SAVE)
    good = folder / "good" / "checkpoint" / "step-2"

    def copied(name):
        return Path(shutil.copytree(good, folder / name / "checkpoint" / "step-2"))

    (copied("no index") / ".metadata").unlink()
    index = copied("a damaged index") / ".metadata"
    index.write_bytes(index.read_bytes()[:50])
    (copied("an empty index") / ".metadata").write_bytes(b"")
    for file in copied("damaged weights").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:50])
    for file in copied("no weights").glob("*.distcp"):
        file.unlink()
    (folder / "empty" / "checkpoint" / "step-2").mkdir(parents=True)
    return (
        "good",
        "no index",
        "a damaged index",
        "an empty index",
        "damaged weights",
        "no weights",
        "empty",
        "missing",
    )


def states_of(running, *, model_only):
    manager = running.checkpointer
    return manager._flattened_model_states_sd(manager._states_to_load(model_only=model_only))


def loaded(source, **options):
    """Load a checkpoint by ``dcp_load`` into the debug model with other weights."""

    def use(running):
        manager = running.checkpointer
        states = states_of(running, model_only=options.get("from_hf", False))
        given = {"checkpoint_id": str(folder / source / "checkpoint" / "step-2"), "from_hf": False} | options
        return manager.dcp_load(states, **{"from_quantized": False} | given), state(running)

    return with_trainer(use, "loading", "--checkpoint.enable", "--debug.seed", "8")


def saved(name, state_dict=None, **options):
    def use(running):
        model_only = options.get("to_hf", False)
        states = states_of(running, model_only=model_only) if state_dict is None else state_dict
        given = {"checkpoint_id": str(folder / name), "async_mode": AsyncMode.DISABLED} | options
        result = running.checkpointer.dcp_save(states, **given)
        if hasattr(result, "result"):
            result.result()
        return sorted(str(path.relative_to(folder)) for path in (folder / name).rglob("*"))

    return with_trainer(use, "saving", "--checkpoint.enable")


FUNCTIONS = {
    "init": Decoder.__init__,
    "init_states": Decoder.init_states,
    "train": Trainer.train,
    "save": CheckpointManager.dcp_save,
    "load": CheckpointManager.dcp_load,
}
torchtitan_launch.folder(folder)
cases = {f"init: {name}": partial(built, name) for name in MODELS}
cases |= {
    "init: on the CPU": lambda: built("llama3", device="cpu"),
    "init: fused": lambda: built("llama3", "torchtitan.overrides.fused_swiglu.fused_swiglu"),
    "init: no layers": lambda: built("llama3", layers=[]),
    "init: no final norm": lambda: built("llama3", norm=None),
    "init: a layer without a norm": lambda: without("llama3", "ffn_norm"),
    "init: a wrong call": lambda: Decoder(),
    "init: a wrong argument": lambda: Decoder(spec("llama3").model, no_such=1),
    "init: no config": lambda: Decoder(None),
    "init_states: a wrong argument": lambda: drawn("llama3", no_such=1),
    "init_states: a device of buffers": lambda: drawn("llama3", buffer_device=torch.device("cpu")),
    "init_states: on meta": lambda: built("llama3").init_states(),
}
cases |= {f"init_states: {name}": partial(drawn, name) for name in ("llama3", "qwen3", "gpt_oss", "muse_glimmer")}
names = checkpoints()
cases |= {f"load: {name}": partial(loaded, name) for name in names}
with_trainer(
    lambda running: running.train(), "hf", *SAVE, "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"
)
cases |= {f"load: {name}, Hugging Face": partial(loaded, name, from_hf=True) for name in ("hf", "good", "missing")}
cases |= {
    "load: an address": lambda: loaded("", checkpoint_id="no-such-scheme://bucket/step-1"),
    "load: no address": lambda: loaded("", checkpoint_id=None),
    "load: a wrong option": lambda: loaded("good", no_such=1),
    "load: a wrong call": lambda: CheckpointManager.dcp_load(),
    "save: a checkpoint": lambda: saved("one"),
    "save: without waiting": lambda: saved("two", async_mode=AsyncMode.ASYNC),
    "save: Hugging Face's format": lambda: saved("three", to_hf=True),
    "save: nothing": lambda: saved("four", {}),
    "save: text": lambda: saved("five", {"text": "text", "number": 1}),
    "save: no address": lambda: saved("six", checkpoint_id=None),
    "save: a wrong option": lambda: saved("seven", no_such=1),
    "save: a wrong call": lambda: CheckpointManager.dcp_save(),
    "train: two steps": lambda: trained("plain"),
    "train: that saves": lambda: trained("saving", *SAVE),
    "train: fused": lambda: trained(
        "fused", "--override.imports", "torchtitan.overrides.fused_swiglu.fused_swiglu", "--training.steps", "1"
    ),
    "train: a wrong call": lambda: Trainer.train(),
    "train: a wrong argument": lambda: with_trainer(lambda running: running.train(1), "wrong"),
}
for name in names[:-1]:
    shutil.copytree(folder / name, folder / f"{name}, resumed")
    cases[f"train: resumes {name}"] = partial(trained, f"{name}, resumed", *RESUME)
observing.main(cases, FUNCTIONS, folder, "torchtitan")
