"""OLMo-core in a study: its config files, its dot list, its saved config and logged metrics.

A config file has the sections of an ``ExperimentConfig``, as YAML or as the ``config.json`` of a run.
"""

from __future__ import annotations

import copy
import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.study.arms import Arm
from olmo_lns.study.engines.base import Engine, Run, dot_list
from olmo_lns.study.files import filled, flatten
from olmo_lns.study.files import read as read_yaml

#: Sections of a run, in the order of their construction.
SECTIONS = ("model", "dataset", "data_loader", "train_module", "trainer")


def read(path: str | Path, overrides: Mapping[str, Any] | None = None, *, placeholder: bool = False) -> dict[str, Any]:
    """Return the file with flat overrides as nested mappings, its variables replaced.

    :param placeholder: replace an unset variable by ``/NAME-is-not-set`` instead of an error.
    :raises LNSConfigError: no such file, an unset variable, a missing section, or a key below a value that is not one.
    """
    tree: dict[str, Any] = filled(read_yaml(Path(path)), str(path), placeholder=placeholder)
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
    """Return true if OLMo-core is installed; ai2-olmo brings 0.1.0, which has no models."""
    return find_spec("olmo_core") is not None and find_spec("olmo_core.nn") is not None


def model_of(path: Path, tree: Mapping[str, Any]) -> Any:
    """Build the model of a config on the meta device, and load each section.

    :raises LNSConfigError: OLMo-core's error, or a class that it lacks, with the file's name.
    """
    from olmo_core.config import Config

    _require_classes(path, tree)
    try:
        sections = {name: Config.from_dict(copy.deepcopy(tree[name])) for name in SECTIONS}
        return sections["model"].build(init_device="meta")
    except LNSError:
        raise
    except Exception as error:  # errors of OLMo-core, OmegaConf and torch
        raise LNSConfigError(f"{path}: OLMo-core refuses it: {one_line(error)}") from error


def _require_classes(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse unknown classes, for which OLMo-core silently builds its default."""
    classes = {key: str(value) for key, value in flatten(tree).items() if key.endswith("_CLASS_")}
    if lacking := [name for name in SECTIONS if f"{name}._CLASS_" not in classes]:
        raise LNSConfigError(f"{path}: {lacking[0]} has no _CLASS_: give its class in OLMo-core")
    for key, name in classes.items():
        module, _, attribute = name.rpartition(".")
        try:
            getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise LNSConfigError(f"{path}: {key}={name}: {error}") from None


STOCK, OURS = "olmo_core.nn.transformer.TransformerBlockConfig", "olmo_lns.olmo_core.BlockConfig"
#: Scheme -> block type.
BLOCKS = {"preln": "default", "lns": "default", "branchln_depth": "reordered_norm"}
_BLOCK, _SCHEME, _EXPONENT = "model.block._CLASS_", "model.block.scheme", "model.block.exponent"
_INITIALIZATION, _NAME, _METHOD = "model.block.initialization", "model.block.name", "model.init_method"
_RESIDUAL = "residual_init"  # of configs/olmo_core/train.py
_MIXER = "model.block.sequence_mixer"


class OLMoCoreEngine(Engine):
    name, title, file_key = "olmo-core", "OLMo-core", "train_module"
    arm_keys = frozenset({_BLOCK, _SCHEME, _EXPONENT, _INITIALIZATION, _NAME, _METHOD, _RESIDUAL})
    compared = re.compile(
        r"model\.(?!_CLASS_|block\.sequence_mixer\.(backend|use_flash))|dataset\.(paths|sequence|label_mask|tokenizer\.(?!id))"
        r"|data_loader\.(global|seed|ignore)|train_module\.(optim|scheduler|max_|z_loss|autocast|label)"
        r"|trainer\.(max_duration|load_path|hard_stop)|init_seed|residual_init"
    )
    plain_keys = {
        "layers": "model.n_layers", "width": "model.d_model", "heads": f"{_MIXER}.n_heads",
        "inner": "model.block.feed_forward.hidden_size", "vocabulary": "model.vocab_size",
        "sequence": "train_module.max_sequence_length",
    }  # fmt: skip
    rate_keys: tuple[str, ...] = ("train_module.optim.lr",)

    def arm(self, arm: Arm) -> dict[str, Any] | None:
        # OLMo-core's scaled initializations also change embedding and head; train.py scales the residual outputs only.
        block = BLOCKS.get(arm.scheme.name)
        initializations = ("plain", "scaled") if arm.scheme.is_pre_ln else ("plain",)
        if block is None or arm.init_fn or arm.initialization not in initializations:
            return None
        common = {_NAME: block, _METHOD: "normal"}
        if arm.scheme.is_pre_ln:
            return {_BLOCK: STOCK, **common} | ({} if arm.initialization == "plain" else {_RESIDUAL: "scaled"})
        return {_BLOCK: OURS, _SCHEME: arm.scheme.name, _EXPONENT: arm.scheme.parameters["exponent"], **common}

    def defining(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        scheme = self.scheme(settings)
        return {
            _SCHEME: str(scheme),
            _NAME: settings.get(_NAME) or "default",
            _METHOD: settings.get(_METHOD) or "normal",
            _RESIDUAL: settings.get(_RESIDUAL) or "plain",
            _INITIALIZATION: "plain" if scheme.is_pre_ln else settings.get(_INITIALIZATION) or "plain",
        }

    def scheme(self, settings: Mapping[str, Any]) -> Scheme:
        if settings.get(_BLOCK) != OURS:
            return PRE_LN
        from olmo_lns.integrations.olmo_core.checkpoint import scheme_of

        return scheme_of(settings.get(_SCHEME) or "lns", settings.get(_EXPONENT))

    def identity(self, name: str, seed: int) -> dict[str, Any]:
        return {"init_seed": seed, "model.init_seed": seed, "data_loader.seed": seed}

    def load(self, path: Path, overrides: Mapping[str, Any]) -> Any:
        """Return the sections of the file with the overrides."""
        return read(path, overrides, placeholder=True)

    def settings(self, loaded: Any) -> dict[str, Any]:
        flat = super().settings(loaded)
        if str(flat.get(_BLOCK, "")).rpartition(".")[2] == STOCK.rpartition(".")[2]:
            flat[_BLOCK] = STOCK  # saved under its defining module
        return flat

    def derived(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        sequence = int(settings["train_module.max_sequence_length"])
        batch, rest = divmod(int(settings["data_loader.global_batch_size"]), sequence)
        if rest:
            raise LNSConfigError(f"data_loader.global_batch_size is in tokens: expected a multiple of {sequence}")
        value, unit = int(settings["trainer.max_duration.value"]), settings["trainer.max_duration.unit"]
        return {
            "kv_heads": int(settings.get(f"{_MIXER}.n_kv_heads") or settings[f"{_MIXER}.n_heads"]),
            "tied": bool(settings.get("model.tie_word_embeddings")),
            "gain": settings.get("model.block.layer_norm.elementwise_affine") is not False,
            "batch": batch,
            "steps": {"steps": value, "tokens": -(-value // (batch * sequence))}.get(unit, 0),
            "warmup": int(settings.get("train_module.scheduler.warmup") or 0),
            "micro_batch": max(1, int(settings["train_module.rank_microbatch_size"]) // sequence),
            "split": int(settings.get("train_module.tp_config.degree") or 1),
        }

    def count(self, path: Path, loaded: Any) -> int:
        return int(model_of(path, loaded).num_params) if available() else super().count(path, loaded)

    def problems(self, settings: Mapping[str, Any], gpus: int) -> list[str]:
        found, sequence = [], self.shape(settings).sequence
        if (micro := int(settings["train_module.rank_microbatch_size"])) % sequence:
            found.append(f"train_module.rank_microbatch_size {micro} is in tokens: expected a multiple of {sequence}")
        if (data := settings.get("dataset.sequence_length")) != sequence:
            found.append(f"dataset.sequence_length {data} is not max_sequence_length {sequence}")
        return found

    def unchecked(self) -> str:
        return "" if available() else "not loaded by OLMo-core, which is not in this environment"

    def words(self, run: Run, folder: Path) -> list[str]:
        own = {"trainer.save_folder": str(folder), "trainer.save_overwrite": True}
        return [str(run.config.resolve()), *(f"--{word}" for word in dot_list({**run.overrides, **own}))]

    def used(self, folder: Path) -> dict[str, Any]:
        saved = sorted(folder.glob("step*/config.json"), key=lambda path: int(path.parent.name.removeprefix("step")))
        found = self.settings(json.loads(saved[-1].read_text(encoding="utf-8"))) if saved else {}
        return {key: value for key, value in found.items() if key != "trainer.load_path"}
