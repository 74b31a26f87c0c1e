"""OLMo-core in a study: its config files, its dot list, the config it saves and the metrics it logs.

A config file has the sections of an ``ExperimentConfig``, as YAML or as the ``config.json`` of a run.
"""

from __future__ import annotations

import copy
import glob
import json
import re
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

import yaml

from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.integrations.olmo_core.config import CLASS as OURS
from olmo_lns.integrations.olmo_core.config import scheme_of
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.study.arms import Arm
from olmo_lns.study.engines.base import Curve, Engine, Machine, Run, Shape, number
from olmo_lns.study.files import filled, flatten
from olmo_lns.study.files import read as read_yaml

#: What a run is made of, in the order in which it is built.
SECTIONS = ("model", "dataset", "data_loader", "train_module", "trainer")


def read(path: str | Path) -> dict[str, Any]:
    """The file as nested mappings, its variables replaced.

    :raises LNSConfigError: no such file, a variable that is not set, or a section that is missing.
    """
    return planned(Path(path), placeholder=False)


def planned(path: Path, overrides: Mapping[str, Any] | None = None, *, placeholder: bool = True) -> dict[str, Any]:
    """:func:`read` with flat overrides, where variables need not be set and OLMo-core need not be there.

    :raises LNSConfigError: also a key below something that is no section.
    """
    tree: dict[str, Any] = filled(read_yaml(path), str(path), placeholder=placeholder)
    if lacking := [name for name in SECTIONS if not isinstance(tree.get(name), dict)]:
        raise LNSConfigError(f"{path} has no section {lacking[0]!r}: expected {', '.join(SECTIONS)}")
    for key, value in (overrides or {}).items():
        *outer, last = key.split(".")
        node: Any = tree
        for name in outer:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise LNSConfigError(f"override {key}: the config has no section {'.'.join(outer)}")
        node[last] = value
    return tree


def available() -> bool:
    """Whether OLMo-core is here; ai2-olmo brings 0.1.0, which has no models."""
    return find_spec("olmo_core") is not None and find_spec("olmo_core.nn") is not None


def build(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Section -> OLMo-core's config object.

    :raises LNSConfigError: OLMo-core's own complaint, or a class that it does not have, with the file's name.
    """
    from olmo_core.config import Config
    from olmo_core.exceptions import OLMoConfigurationError

    sections = {}
    for name in SECTIONS:
        _require_classes(path, name, tree[name])
        try:
            sections[name] = Config.from_dict(copy.deepcopy(tree[name]))
        except (OLMoConfigurationError, ImportError, TypeError, ValueError) as error:
            raise LNSConfigError(f"{path}: OLMo-core refuses {name}: {one_line(error)}") from error
    return sections


def model_of(path: Path, tree: Mapping[str, Any]) -> Any:
    """The model of a config on the meta device; it draws and holds nothing.

    :raises LNSConfigError: as :func:`build`, or a model that OLMo-core cannot build.
    """
    config = build(path, tree)["model"]
    try:
        return config.build(init_device="meta")
    except LNSError:
        raise
    except Exception as error:  # OLMo-core's and torch's own, of many kinds
        raise LNSConfigError(f"{path}: OLMo-core cannot build this model: {one_line(error)}") from error


def _require_classes(path: Path, where: str, node: Any) -> None:
    """OLMo-core takes a class that it cannot find for none, and builds its default in silence."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        _require_classes(path, f"{where}.{key}", value)
    name = node.get("_CLASS_") if isinstance(node, dict) else None
    if name is None:
        if where in SECTIONS:
            raise LNSConfigError(f"{path}: {where} has no _CLASS_: say which class of OLMo-core it is")
        return
    module, _, attribute = str(name).rpartition(".")
    try:
        if not hasattr(import_module(module), attribute):
            raise ImportError(f"{module} has no {attribute}")
    except ImportError as error:
        raise LNSConfigError(f"{path}: {where}._CLASS_={name}: {error}") from None


def overrides_to_args(overrides: Mapping[str, Any]) -> list[str]:
    """``{"model.d_model": 64}`` → ``["--model.d_model=64"]``; OLMo-core reads each value as YAML."""

    def word(value: Any) -> str:
        if isinstance(value, str):
            return value
        return yaml.safe_dump(value, default_flow_style=True, width=2**16).removesuffix("...\n").strip()

    return [f"--{key}={word(value)}" for key, value in overrides.items()]


STOCK = "olmo_core.nn.transformer.TransformerBlockConfig"
#: Scheme -> type of the block that it is laid on.
BLOCKS = {"preln": "default", "lns": "default", "branchln_depth": "reordered_norm", "sandwich_depth": "peri_norm"}
_BLOCK, _SCHEME, _EXPONENT = "model.block._CLASS_", "model.block.scheme", "model.block.exponent"
_INITIALIZATION, _NAME, _METHOD = "model.block.initialization", "model.block.name", "model.init_method"
_RESIDUAL = "residual_init"  # of configs/olmo_core/train.py
LOSS = "train/CE loss"
STEP = re.compile(r"\[step=(\d+)/(\d+|\?\?\?),epoch=\d+(?:,eta=[^\]]*)?\]\s*$")
METRIC = re.compile(r"^ {4,}(train|eval/lm/heldout)/CE loss=(\S+)\s*$")
#: The held-out text's place in a config.
HELDOUT = "trainer.callbacks.heldout."
#: What every line of its own log names; OLMo marks its steps nearly the same.
_OWN = re.compile(r"\bolmo_core\.|^ {4,}train/CE loss=", re.M)


class OLMoCoreEngine(Engine):
    name, title, file_key = "olmo-core", "OLMo-core", "train_module"
    loss = LOSS
    arm_keys = frozenset(
        {_BLOCK, _SCHEME, _EXPONENT, _INITIALIZATION, "model.block.scale_router", _NAME, _METHOD, _RESIDUAL}
    )
    bookkeeping: tuple[str, ...] = (
        "_CLASS_", "trainer._CLASS_", "trainer.save_", "trainer.work_dir", "trainer.load_", "trainer.checkpointer",
        "trainer.callbacks", "trainer.metrics_collect_interval", "trainer.cancel_check_interval", "trainer.device",
        "trainer.async_bookkeeping", "trainer.bookkeeping_", "trainer.no_", "dataset.work_dir", "dataset._CLASS_",
        "dataset.expand_glob", "dataset.include_instance_metadata", "dataset.tokenizer.identifier",
        "data_loader.work_dir", "data_loader.num_", "data_loader.prefetch_factor", "data_loader.target_device_type",
        "data_loader._CLASS_", "train_module._CLASS_", "train_module.rank_microbatch_size",
        "train_module.compile_model", "train_module.dp_config", "train_module.tp_config", "train_module.cp_config",
        "train_module.pp_config", "train_module.ep_config", "train_module.ac_config", "train_module.state_dict_",
        "train_module.load_key_mapping", "model._CLASS_", "model.block.sequence_mixer.backend",
        "model.block.sequence_mixer.use_flash", "launch", "run_name",
    )  # fmt: skip
    start: tuple[str, tuple[str, ...]] = ("trainer.load_path", ("trainer.save_folder",))
    rate_keys: tuple[str, ...] = ("train_module.optim.lr",)
    data_key = "dataset.paths"

    def arm(self, arm: Arm) -> dict[str, Any] | None:
        # Its scaled initializations change the embedding and the head as well; train.py scales the residual outputs.
        block = BLOCKS.get(arm.scheme.name)
        if block is None or arm.initialization not in ("plain", "scaled" if arm.scheme.is_pre_ln else "plain"):
            return None
        common = {_NAME: block, _METHOD: "normal"}
        if arm.scheme.is_pre_ln:
            return {_BLOCK: STOCK, **common} | ({} if arm.initialization == "plain" else {_RESIDUAL: "scaled"})
        return {_BLOCK: OURS, _SCHEME: arm.scheme.name, _EXPONENT: arm.scheme.parameters["exponent"], **common}

    def defining(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        scheme = self.scheme(settings)
        return {
            _SCHEME: str(scheme),
            _NAME: settings.get(_NAME, "default"),
            _METHOD: settings.get(_METHOD, "normal"),
            _RESIDUAL: settings.get(_RESIDUAL) or "plain",
            _INITIALIZATION: "plain" if scheme.is_pre_ln else settings.get(_INITIALIZATION) or "plain",
        }

    def scheme(self, settings: Mapping[str, Any]) -> Scheme:
        if settings.get(_BLOCK) != OURS:
            return PRE_LN
        return scheme_of(settings.get(_SCHEME) or "lns", exponent=settings.get(_EXPONENT))

    def scaled(self, settings: Mapping[str, Any]) -> str | None:
        if settings.get(_RESIDUAL) == "scaled":
            return f"{_RESIDUAL}: scaled: expected plain"
        if (method := settings.get(_METHOD, "normal")) in ("normal", "fan_in"):
            return None
        return f"the scaled initialization {method!r}: expected model.init_method: normal or fan_in"

    def identity(self, name: str, seed: int) -> dict[str, Any]:
        return {"init_seed": seed, "model.init_seed": seed, "data_loader.seed": seed}

    def load(self, path: Path, overrides: Mapping[str, Any]) -> Any:
        """The sections of the file, with its overrides."""
        return planned(path, overrides)

    def settings(self, loaded: Any) -> dict[str, Any]:
        flat = flatten(loaded)
        if str(flat.get(_BLOCK, "")).rpartition(".")[2] == STOCK.rpartition(".")[2]:
            flat[_BLOCK] = STOCK  # saved under the module that defines it
        return flat

    def _shape(self, settings: Mapping[str, Any]) -> Shape:
        mixer, sequence = "model.block.sequence_mixer", int(settings["train_module.max_sequence_length"])
        heads, rate = int(settings[f"{mixer}.n_heads"]), float(settings["train_module.optim.lr"])
        batch, rest = divmod(int(settings["data_loader.global_batch_size"]), sequence)
        if rest:
            raise LNSConfigError(f"data_loader.global_batch_size is in tokens: expected a multiple of {sequence}")
        return Shape(
            layers=int(settings["model.n_layers"]),
            width=int(settings["model.d_model"]),
            heads=heads,
            kv_heads=int(settings.get(f"{mixer}.n_kv_heads") or heads),
            inner=int(settings["model.block.feed_forward.hidden_size"]),
            vocabulary=int(settings["model.vocab_size"]),
            tied=bool(settings.get("model.tie_word_embeddings")),
            gain=settings.get("model.block.layer_norm.elementwise_affine") is not False,
            sequence=sequence,
            batch=batch,
            steps=_steps(settings, batch * sequence),
            warmup=int(settings.get("train_module.scheduler.warmup") or 0),
            learning_rate=rate,
            min_learning_rate=rate * float(settings.get("train_module.scheduler.alpha_f") or 0.0),
        )

    def machine(self, settings: Mapping[str, Any]) -> Machine:
        tensor = int(settings.get("train_module.tp_config.degree") or 1)
        return Machine(
            strategy=str(settings.get("train_module.dp_config.name") or "ddp"),
            micro_batch=max(1, int(settings["train_module.rank_microbatch_size"]) // self.shape(settings).sequence),
            split=tensor,
            split_by=f"tp_config.degree {tensor}" if tensor > 1 else "",
            recompute="train_module.ac_config.mode" in settings,
        )

    def count(self, path: Path, loaded: Any) -> tuple[int, float | None]:
        if not available():
            return super().count(path, loaded)
        model, sequence = model_of(path, loaded), self.shape(self.settings(loaded)).sequence
        return int(model.num_params), float(model.num_flops_per_token(sequence))

    def problems(self, settings: Mapping[str, Any], gpus: int) -> tuple[list[str], list[str]]:
        found, sequence = [], self.shape(settings).sequence
        if (micro := int(settings["train_module.rank_microbatch_size"])) % sequence:
            found.append(f"train_module.rank_microbatch_size {micro} is in tokens: expected a multiple of {sequence}")
        if (data := settings.get("dataset.sequence_length")) != sequence:
            found.append(f"dataset.sequence_length {data} is not max_sequence_length {sequence}")
        absent = "not loaded by OLMo-core, which is not in this environment"
        return found, [] if available() else [absent]

    def words(self, run: Run, folder: Path) -> list[str]:
        settings = {**run.overrides, "trainer.save_folder": str(folder), "trainer.save_overwrite": True}
        return [str(run.config.resolve()), *overrides_to_args(settings)]

    def data_files(self, settings: Mapping[str, Any]) -> list[str]:
        keys = ("dataset.paths", f"{HELDOUT}eval_dataset.paths")
        paths = [str(path) for key in keys for path in settings.get(key) or []]
        if not settings.get("dataset.expand_glob"):
            return paths
        # A pattern without a match stays: the launch then names it as the file that is missing.
        return [path for pattern in paths for path in sorted(glob.glob(pattern)) or [pattern]]

    def heldout(self, settings: Mapping[str, Any]) -> Any:
        return settings.get(f"{HELDOUT}eval_dataset.sequence_length")

    def used(self, folder: Path) -> dict[str, Any]:
        saved = sorted(folder.glob("step*/config.json"), key=lambda path: int(path.parent.name.removeprefix("step")))
        return self.settings(json.loads(saved[-1].read_text(encoding="utf-8"))) if saved else {}

    def curve(self, path: Path, text: str) -> Curve | None:
        if not _OWN.search(text):
            return None
        curve, total, step = Curve({}, None, str(path)), None, None
        for line in text.splitlines():
            if match := STEP.search(line):
                # A line with the step alone is progress; the losses of several steps follow together.
                step, total = int(match[1]), None if match[2] == "???" else int(match[2])
            elif step is not None and (match := METRIC.match(line)):
                if match[1] == "train":
                    curve.add(step, match[2])
                else:
                    curve.heldout[step] = number(path, step, match[2])
        return replace(curve, total=total)


def _steps(settings: Mapping[str, Any], tokens_per_step: int) -> int:
    value, unit = settings["trainer.max_duration.value"], settings["trainer.max_duration.unit"]
    if unit not in ("steps", "tokens"):
        raise LNSConfigError(f"trainer.max_duration is in {unit}: give steps or tokens, so that it is equal")
    return int(value) if unit == "steps" else -(-int(value) // tokens_per_step)
