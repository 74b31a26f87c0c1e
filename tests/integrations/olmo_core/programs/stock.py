"""Runs what this package wraps in OLMo-core, on inputs of every kind. Usage: ``stock.py FOLDER``."""

import copy
import functools
import json
import shutil
import sys
from pathlib import Path

import torch
from olmo_core.nn.transformer import Transformer, TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerTrainModuleConfig
from support import observing
from support import olmo_core_models as small

folder = Path(sys.argv[1])
partial = functools.partial
CPU = torch.device("cpu")


def changed(config, **changes):
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def named_blocks():
    """Two kinds of blocks in turn, and one override."""
    config = small.config()
    other = copy.deepcopy(config.block)
    other.layer_norm = small.config(norm={"name": "default"}).block.layer_norm
    return changed(config, block={"one": config.block, "two": other}, block_pattern=["one", "two"])


def overridden():
    config = small.config()
    return changed(config, block_overrides={1: copy.deepcopy(config.block)})


#: What OLMo-core's TransformerConfig is given.
CONFIGS = {block: partial(small.config, block) for block in (*small.SCHEMES, "default_scaled", "peri_norm")} | {
    "LayerNorm": lambda: small.config(norm={"name": "default"}),
    "normal": lambda: changed(small.config(), init_method="normal"),
    "fan_in": lambda: changed(small.config(), init_method="fan_in"),
    "llama": lambda: changed(small.config(), init_method="llama"),
    "llama_depth": lambda: changed(small.config(), init_method="llama_depth"),
    "named blocks": named_blocks,
    "an override": overridden,
    "nGPT": lambda: TransformerConfig.ngpt_like(d_model=32, vocab_size=64, n_layers=2, n_heads=4),
    "an unknown block": lambda: small.config("no_such_block"),
    "an unknown initialization": lambda: changed(small.config(), init_method="none"),
    "no blocks": lambda: changed(small.config(), block=None),
}


def built(make, **options):
    return make().build(**options)


LENGTHS = dict(max_seq_len=small.TOKENS.shape[1], max_local_microbatch_size=small.TOKENS.numel())


def drawn(make, *args, device="meta", **options):
    torch.manual_seed(0)
    model = make().build(init_device=device)
    generator = model.init_weights(*args, device=CPU, **(options or LENGTHS))
    return model, generator.get_state(), model(small.TOKENS)


# --- checkpoints ----------------------------------------------------------------------------------------------------------


def train_module(make=small.config):
    settings = TransformerTrainModuleConfig(
        rank_microbatch_size=48, max_sequence_length=12, optim=AdamWConfig(lr=1e-3), z_loss_multiplier=None
    )
    torch.manual_seed(5)
    return settings.build(make().build(init_device="meta"), device=CPU)


def checkpoints():
    """OLMo-core saves one with its config, as its ConfigSaverCallback does, and it is copied and changed."""
    good, saver = folder / "good", Checkpointer(work_dir=folder / "work")
    config = json.dumps({"model": small.config().as_config_dict()})
    saver.save(good, train_module(), {"step": 1})
    saver.write_file(good, "config.json", config)

    def copied(name, config=None):
        place = Path(shutil.copytree(good, folder / name))
        if config is not None:
            (place / "config.json").write_text(config)
        return place

    (copied("no config") / "config.json").unlink()
    copied("damaged config", config[:100])
    copied("another program's config", json.dumps({"model": {"n_layers": "4", "block": ["attention", "mlp"]}}))
    copied("a list as config", "[1, 2]")
    copied("another config of blocks", json.dumps({"model": {"n_layers": 2, "block": "llama", "block_pattern": ["a"]}}))
    copied("a config of bytes").joinpath("config.json").write_bytes(b"\xff\xfe\x00")
    shutil.rmtree(copied("no trainer state") / "train")
    shutil.rmtree(copied("no weights") / "model_and_optim")
    (copied("no metadata") / "model_and_optim" / ".metadata").unlink()
    for file in (copied("damaged weights") / "model_and_optim").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:50])
    (folder / "empty").mkdir()
    return [path.name for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "work"] + ["missing"]


def loaded(name, make=small.config, **options):
    module = train_module(make)
    state = Checkpointer(work_dir=folder / "work").load(folder / name, module, **options)
    return state, module.model, module.optim.state_dict()


FUNCTIONS = {"build": TransformerConfig.build, "init_weights": Transformer.init_weights, "load": Checkpointer.load}
cases = {f"build: {name}": partial(built, make) for name, make in CONFIGS.items()}
#: The factor of default_scaled is a buffer that OLMo-core leaves to what was in memory.
cases |= {f"init_weights: {name}": partial(drawn, make) for name, make in CONFIGS.items() if name != "default_scaled"}
cases |= {
    "build: on meta": lambda: built(small.config, init_device="meta"),
    "build: an unknown device": lambda: built(small.config, init_device="nowhere"),
    "build: a wrong argument": lambda: built(small.config, no_such=1),
    "build: a wrong call": lambda: TransformerConfig.build(),
    "init_weights: without lengths": lambda: drawn(small.config, max_seq_len=None),
    "init_weights: of weights on the CPU": lambda: drawn(small.config, device="cpu"),
    "init_weights: a wrong argument": lambda: drawn(small.config, no_such=1),
    "init_weights: a positional argument": lambda: drawn(small.config, 12),
    "load: another shape": lambda: loaded("good", partial(small.config, d_model=64)),
    "load: another norm": lambda: loaded("good", partial(small.config, norm={"name": "default"})),
    "load: no train module": lambda: Checkpointer(work_dir=folder / "work").load(folder / "good", None),
    "load: no folder": lambda: Checkpointer(work_dir=folder / "work").load(None, train_module()),
    "load: a wrong call": lambda: Checkpointer(work_dir=folder / "work").load(),
    "load: a wrong option": lambda: loaded("good", no_such=1),
    "load: the folder of weights": lambda: loaded("good/model_and_optim", load_optim_state=False),
    "load: an address": lambda: loaded("no-such-scheme://bucket/step1"),
}
cases |= {f"load: {name}": partial(loaded, name) for name in checkpoints()}
for name in ("good", "no config", "damaged config", "empty"):
    cases[f"load: {name}, weights alone"] = partial(loaded, name, load_trainer_state=False, load_optim_state=False)
observing.main(cases, FUNCTIONS, folder, "olmo_core")
