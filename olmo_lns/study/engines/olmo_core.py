"""The OLMo-core engine: config files, arguments of the training script, the config that OLMo-core saves.

A config file has the sections of an ``ExperimentConfig``, as YAML or as the ``config.json`` of a run.
"""

from __future__ import annotations

import copy
import json
import re
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

from olmo_lns.arms import Arm
from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.integrations.olmo_core.layouts import LAYOUTS
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.study.engines.base import Engine, Run, dot_list
from olmo_lns.study.yaml_files import fill_variables, flatten
from olmo_lns.study.yaml_files import read as read_yaml

#: Sections of a run, in the order of their construction.
SECTIONS = ("model", "dataset", "data_loader", "train_module", "trainer")


def read(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    placeholder: bool = False,
) -> dict[str, Any]:
    """Return a config file with flat overrides as nested mappings. Variables are replaced.

    :param variables: values that take precedence over the environment's.
    :param placeholder: replace an unset variable by ``/NAME-is-not-set`` instead of an error.
    :raises LNSConfigError: if there is no such file, if a variable is not set, if a section is missing, or if an
        override names a key below a plain value.
    """
    config: dict[str, Any] = fill_variables(
        read_yaml(Path(path)), str(path), variables=variables, placeholder=placeholder
    )
    if missing := [name for name in SECTIONS if not isinstance(config.get(name), dict)]:
        raise LNSConfigError(
            f"{path} has no section {missing[0]!r}. Expected the sections {', '.join(SECTIONS)}. Add the section."
        )
    for key, value in (overrides or {}).items():
        *parents, name = key.split(".")
        section: Any = config
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise LNSConfigError(
                f"The override {key} cannot be applied, because the config has no section {'.'.join(parents)}. Correct "
                "the key."
            )
        section[name] = value
    return config


def available() -> bool:
    """Return true if an OLMo-core with models is installed. Version 0.1.0, which ai2-olmo requires, has none."""
    return find_spec("olmo_core") is not None and find_spec("olmo_core.nn") is not None


#: Model config without schemes as JSON -> number of parameters.
_COUNTS: dict[str, int] = {}


def count_parameters(path: Path, config: Mapping[str, Any]) -> int:
    """Load every section of a config, and count the parameters of its model, which a scheme does not change.

    The model is built on the meta device without its scheme, and once for all arms of a size.

    :raises LNSConfigError: if a class does not exist, or OLMo-core refuses the config. The message names the file.
    """
    from olmo_core.config import Config

    from olmo_lns.integrations.olmo_core.blocks import require_supported
    from olmo_lns.olmo_core import BlockConfig

    _require_classes(path, config)
    try:
        sections = {name: Config.from_dict(copy.deepcopy(config[name])) for name in SECTIONS}
        model = sections["model"]
        if isinstance(model.block, BlockConfig):
            require_supported(model.block.resolved_scheme, model.block.name, model.n_layers)
            model.block = model.block.stock()
        key = json.dumps(flatten({**model.as_config_dict(), "init_seed": 0}), sort_keys=True)
        if key not in _COUNTS:
            _COUNTS[key] = int(model.build(init_device="meta").num_params)
        return _COUNTS[key]
    except LNSError:
        raise
    except Exception as error:  # errors of OLMo-core, OmegaConf and torch
        raise LNSConfigError(f"OLMo-core refuses the config {path}: {one_line(error)}") from error


def _require_classes(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse unknown classes, for which OLMo-core silently builds its default."""
    classes = {key: str(value) for key, value in flatten(config).items() if key.endswith("_CLASS_")}
    if missing := [name for name in SECTIONS if f"{name}._CLASS_" not in classes]:
        raise LNSConfigError(
            f"{path}: the section {missing[0]} has no key _CLASS_. Add the name of its class in OLMo-core."
        )
    for key, class_path in classes.items():
        module, _, class_name = class_path.rpartition(".")
        try:
            getattr(import_module(module), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise LNSConfigError(
                f"{path}: the class {class_path} could not be imported: {error}. Correct the key {key}."
            ) from None


STOCK_CLASS, LNS_CLASS = "olmo_core.nn.transformer.TransformerBlockConfig", "olmo_lns.olmo_core.BlockConfig"
#: Number of blocks for which a scheme is compared with the layouts. A scheme may change only some of many blocks.
_N_LAYERS = 100
_CLASS, _SCHEME, _EXPONENT = "model.block._CLASS_", "model.block.scheme", "model.block.exponent"
_INITIALIZATION, _NAME, _METHOD = "model.block.initialization", "model.block.name", "model.init_method"
_RESIDUAL = "residual_init"  # an option of configs/olmo_core/train.py
_MIXER = "model.block.sequence_mixer"


def _block_name(scheme: Scheme) -> str | None:
    """Return the first ``block.name`` that supports a scheme, or None."""
    if set(scheme.parameters) - {"exponent"}:  # the only parameter of a BlockConfig
        return None
    return next((name for name, layout in LAYOUTS.items() if layout.fits(scheme, _N_LAYERS)), None)


class OLMoCoreEngine(Engine):
    name, title, identifying_key = "olmo-core", "OLMo-core", "train_module"
    arm_keys = frozenset({_CLASS, _SCHEME, _EXPONENT, _INITIALIZATION, _NAME, _METHOD, _RESIDUAL})
    compared_keys = re.compile(
        r"model\.(?!_CLASS_|init_device|block\.sequence_mixer\.(backend|use_flash))"
        r"|dataset\.(paths|mix$|dtype|sequence|max_target|label_mask|generate_doc|instance_filter|source|tokenizer\.(?!id))"
        r"|data_loader\.(global|seed|ignore)|train_module\.(optim|scheduler|max_|z_loss|autocast|label|float8)"
        r"|trainer\.(max_duration|load_|hard_stop|steps_to_skip)|init_seed|residual_init"
    )
    ignored_keys = re.compile(
        r"_CLASS_|.*\._CLASS_$|run_name|model\.(init_device|block\.sequence_mixer\.(backend|use_flash))"
        r"|dataset\.(mix_base|expand|metadata|include|work_dir|ignore|tokenizer\.id)"
        r"|data_loader\.(work_dir|num_|prefetch|target_device)"
        r"|train_module\.(rank_micro|compile|(pp|dp|tp|cp|ep|ac)_config|state_dict|load_key)"
        r"|trainer\.(save_|work_dir|checkpointer|device|cancel|metrics|callbacks|async|bookkeeping|no_|checkpoints)"
    )
    workload_keys = {
        "layers": "model.n_layers", "hidden_size": "model.d_model", "heads": f"{_MIXER}.n_heads",
        "ffn_hidden_size": "model.block.feed_forward.hidden_size", "vocab_size": "model.vocab_size",
        "sequence_length": "train_module.max_sequence_length",
    }  # fmt: skip
    rate_keys: tuple[str, ...] = ("train_module.optim.lr",)

    def arm_overrides(self, arm: Arm) -> dict[str, Any] | None:
        # OLMo-core's scaled initializations also change embedding and head; train.py scales the residual outputs only.
        block_name = _block_name(arm.scheme)
        initializations = ("plain", "scaled") if arm.scheme.is_pre_ln else ("plain",)
        if block_name is None or arm.init_fn or arm.initialization not in initializations:
            return None
        overrides: dict[str, Any] = {_NAME: block_name, _METHOD: "normal"}
        if not arm.scheme.is_pre_ln:
            exponent = arm.scheme.parameters.get("exponent")  # null also overrides an exponent in the base config
            return {_CLASS: LNS_CLASS, _SCHEME: arm.scheme.name, _EXPONENT: exponent, **overrides}
        if arm.initialization == "scaled":
            overrides[_RESIDUAL] = "scaled"
        return {_CLASS: STOCK_CLASS, **overrides}

    def arm_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        scheme = self.scheme(settings)
        return {
            _SCHEME: str(scheme),
            _NAME: settings.get(_NAME) or "default",
            _METHOD: settings.get(_METHOD) or "normal",
            _RESIDUAL: settings.get(_RESIDUAL) or "plain",
            _INITIALIZATION: "plain" if scheme.is_pre_ln else settings.get(_INITIALIZATION) or "plain",
        }

    def scheme(self, settings: Mapping[str, Any]) -> Scheme:
        """Return the scheme of a run."""
        if settings.get(_CLASS) != LNS_CLASS:
            return PRE_LN
        from olmo_lns.integrations.olmo_core.checkpoint import scheme_of

        return scheme_of(settings.get(_SCHEME) or "lns", settings.get(_EXPONENT))

    def name_and_seed_overrides(self, name: str, seed: int) -> dict[str, Any]:
        return {"init_seed": seed, "model.init_seed": seed, "data_loader.seed": seed}

    def load(self, path: Path, overrides: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Any:
        """Return the sections of a file with the overrides."""
        return read(path, overrides, variables=variables, placeholder=True)

    def flat_settings(self, loaded: Any) -> dict[str, Any]:
        flat = super().flat_settings(loaded)
        if str(flat.get(_CLASS, "")).rpartition(".")[2] == STOCK_CLASS.rpartition(".")[2]:
            flat[_CLASS] = STOCK_CLASS  # a saved config names the defining module
        return flat

    def derived_fields(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        sequence_length = int(settings["train_module.max_sequence_length"])
        tokens_per_step = int(settings["data_loader.global_batch_size"])
        if tokens_per_step % sequence_length:
            raise LNSConfigError(
                f"data_loader.global_batch_size is {tokens_per_step} tokens. It must be a multiple of the sequence "
                f"length, {sequence_length}. Change one of them."
            )
        duration, unit = int(settings["trainer.max_duration.value"]), settings["trainer.max_duration.unit"]
        return {
            "kv_heads": int(settings.get(f"{_MIXER}.n_kv_heads") or settings[f"{_MIXER}.n_heads"]),
            "has_tied_embeddings": bool(settings.get("model.tie_word_embeddings")),
            "has_norm_weight": settings.get("model.block.layer_norm.elementwise_affine") is not False,
            "batch_size": tokens_per_step // sequence_length,
            "steps": {"steps": duration, "tokens": -(-duration // tokens_per_step)}.get(unit, 0),
            "warmup": int(settings.get("train_module.scheduler.warmup") or 0),
            "micro_batch_size": max(1, int(settings["train_module.rank_microbatch_size"]) // sequence_length),
            "model_parallel_size": int(settings.get("train_module.tp_config.degree") or 1),
        }

    def count(self, path: Path, loaded: Any) -> int:
        return count_parameters(path, loaded) if available() else super().count(path, loaded)

    def problems(self, settings: Mapping[str, Any], gpus: int) -> list[str]:
        problems, length = [], self.workload(settings).sequence_length
        if (micro_batch := int(settings["train_module.rank_microbatch_size"])) % length:
            problems.append(
                f"train_module.rank_microbatch_size is {micro_batch} tokens. It must be a multiple of the sequence "
                f"length, {length}. Change one of them."
            )
        if (data_length := settings.get("dataset.sequence_length")) != length:
            problems.append(
                f"dataset.sequence_length is {data_length}, but train_module.max_sequence_length is {length}. Set both "
                "to one number."
            )
        return problems

    def missing_data(self, settings: Mapping[str, Any]) -> str:
        for key, paths in settings.items():
            for path in paths if key.endswith(".paths") and isinstance(paths, list) else []:
                if "://" not in str(path) and not glob(str(path), recursive=True):
                    return f"{path} of {key} was not found."
        return ""

    def skipped_check(self) -> str:
        if available():
            return ""
        return "OLMo-core did not check the configs, because it is not installed here. docs/olmo-core.md installs it."

    def arguments(self, run: Run, folder: Path) -> list[str]:
        checkpoints = {"trainer.save_folder": str(folder), "trainer.save_overwrite": True}
        return [str(run.config.resolve()), *(f"--{item}" for item in dot_list({**run.overrides, **checkpoints}))]

    def saved_settings(self, folder: Path) -> dict[str, Any]:
        paths = sorted(folder.glob("step*/config.json"), key=lambda path: int(path.parent.name.removeprefix("step")))
        settings = self.flat_settings(json.loads(paths[-1].read_text(encoding="utf-8"))) if paths else {}
        return {key: value for key, value in settings.items() if key != "trainer.load_path"}
