"""Megatron-LM in a study: configs of its flags, its printed arguments, its console log.

A config is a YAML file. A key is a flag without its dashes; ``true`` is a bare flag, ``false`` and ``null`` omit it, a
list has several values. Megatron's own ``--yaml-cfg`` is another format, whose example does not parse.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Mapping, Sequence
from unittest import mock

from olmo_lns.arguments import Parser
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.flags import variables
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, PRE_LN
from olmo_lns.study.arms import Arm
from olmo_lns.study.engines.base import Engine, Run
from olmo_lns.study.files import VARIABLE, filled, located
from olmo_lns.study.files import read as read_yaml

OPTION = "--lns-config"


def read(path: Path) -> dict[str, Any]:
    """Return the file's settings under Megatron's argument names (``num_layers``), without replacing variables.

    :raises LNSConfigError: no such file, not a flat mapping, or a key written with an underscore.
    """
    raw = read_yaml(path := located(path, "megatron"))
    for key, value in raw.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise LNSConfigError(f"{path}: key {key!r}: expected a Megatron flag without dashes, such as num-layers")
        if any(isinstance(item, (dict, list)) for item in (value if isinstance(value, list) else [value])):
            raise LNSConfigError(f"{path}: {key}: expected a value or a list of values")
    return {key.replace("-", "_"): value for key, value in raw.items()}


def _omitted(value: Any) -> bool:
    return value is None or value is False


def to_flags(settings: Mapping[str, Any], *, placeholder: bool = False) -> list[str]:
    """Return flags and values for an argument list.

    :param placeholder: replace an unset variable by ``/NAME-is-not-set`` instead of an error.
    :raises LNSConfigError: a variable that is not set.
    """
    flags: list[str] = []
    for key, value in settings.items():
        if _omitted(value):
            continue
        flags.append(flag := "--" + key.replace("_", "-"))
        for text in map(str, [] if value is True else value if isinstance(value, list) else [value]):
            found = filled(text, flag, placeholder=placeholder)
            # A variable may hold several words, as for --data-path.
            flags += shlex.split(found) if VARIABLE.fullmatch(text) else [found]
    return flags


def expand(argv: Sequence[str], *, placeholder: bool = False) -> list[str]:
    """Replace ``--lns-config FILE`` by the file's flags; explicit flags take precedence.

    >>> expand(["--lns-config", "60M-lns.yaml", "--micro-batch-size", "4"])   # doctest: +SKIP

    :raises LNSConfigError: two files, or errors of :func:`read` and :func:`to_flags`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(OPTION, dest="files", type=Path, action="append", default=[])
    own, explicit = parser.parse_known_args(argv)
    if not own.files:
        return explicit
    if len(own.files) > 1:
        raise LNSConfigError(f"{OPTION}: found {len(own.files)} files, expected one")
    given = {word[2:].split("=", 1)[0].replace("-", "_") for word in explicit if word.startswith("--")}
    in_file = {key: value for key, value in read(own.files[0]).items() if key not in given}
    return to_flags(in_file, placeholder=placeholder) + explicit


def available() -> bool:
    """Return true if ``megatron.training`` is in ``MEGATRON_LM_SRC`` or installed."""
    if os.environ.get("MEGATRON_LM_SRC"):
        return True
    return find_spec("megatron") is not None and find_spec("megatron.training") is not None


def parse(flags: Sequence[str], gpus: int = 8) -> argparse.Namespace:
    """Parse flags, including the plugin's, with Megatron's parser and ``validate_args``.

    A machine without a GPU is treated as one with an H100.

    :param gpus: number of GPUs, from which Megatron derives data parallelism.
    :raises LNSConfigError: ``megatron.training`` cannot be imported, or Megatron refuses the flags.
    """
    import torch

    from olmo_lns.integrations.megatron import register

    if (source := os.environ.get("MEGATRON_LM_SRC")) and source not in sys.path:
        sys.path.insert(0, source)
    register()
    device = None if torch.cuda.is_available() else SimpleNamespace(major=9, minor=0)
    launched = {"RANK": "0", "WORLD_SIZE": str(gpus)} | variables(flags)
    with tempfile.TemporaryFile("w+") as printed, contextlib.ExitStack() as stack:  # 0.16 needs stderr's descriptor
        stack.enter_context(mock.patch.dict(os.environ, launched))
        stack.enter_context(mock.patch.object(sys, "argv", ["pretrain_gpt.py", *flags]))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        if device:
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda _=None: device))
        try:
            from megatron.training import arguments

            found: argparse.Namespace = arguments.validate_args(arguments.parse_args())
            return found
        except (ImportError, AssertionError, ValueError, SystemExit) as error:
            printed.seek(0)
            lines = [line.strip() for line in printed if "error:" in line]
            what = "cannot be imported" if isinstance(error, ImportError) else "refuses the flags"
            raise LNSConfigError(f"Megatron {what}: {lines[-1] if lines else error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Print the flags of a config."""
    parser = Parser(prog="olmo-lns megatron-args", description="Print the Megatron flags of a config.")
    parser.add_argument("config", help="a file, or a name of the pack: 60M-lns")
    parser.add_argument("--one-per-line", action="store_true")
    args, explicit = parser.parse_known_args(argv)
    text = shlex.join(expand([OPTION, args.config, *explicit], placeholder=True))
    print(text.replace(" --", "\n--") if args.one_per_line else text)
    for name in dict.fromkeys(re.findall(r"/(\w+)-is-not-set", text)):
        print(f"note: {name} is not set: export {name}=…, or give the flag", file=sys.stderr)
    return 0


ARGUMENT = re.compile(r"^(?:\[?\w*\d+\]?:\s*)? {2}([a-z0-9_]+) \.{2,} (.*)$", re.M)
#: The plugin's arguments with their defaults.
DEFAULTS = {
    "layernorm_scaling": False,
    "layernorm_scaling_exponent": DEFAULT_EXPONENT,
    "layernorm_scaling_keep_scaled_init": False,
    "no_scaled_init": False,
}


class MegatronEngine(Engine):
    name, title, file_key = "megatron", "Megatron", "num-layers"
    default_seed = 1234
    arm_keys = frozenset(DEFAULTS)
    compared = re.compile(
        r"(?!save|load|tensorboard|wandb|log_|timing|rank|local_rank|world_size|master_|data_parallel_size|one_logger|"
        r"micro_batch_size|tensor_model_parallel_size|(pipeline|virtual|context|decoder|encoder|transformer_pipeline)_|"
        r"num_layers_per_virtual|sequence_parallel|use_distributed_optimizer|overlap_|recompute_|exit_|eval_|app_tag|"
        r"num_workers|non_persistent_|ckpt_|async_save|distributed_|lns_config|norm_backend|iteration|consumed_)"
    )
    base_arm = "preln_scaled_init"  # the stock files, without a flag that would have to be removed
    save_variable, data_variable = "MEGATRON_SAVE_DIR", "MEGATRON_DATA"
    plain_keys = {
        "layers": "num_layers", "width": "hidden_size", "heads": "num_attention_heads", "inner": "ffn_hidden_size",
        "sequence": "seq_length", "batch": "global_batch_size", "steps": "train_iters",
    }  # fmt: skip
    rate_keys: tuple[str, ...] = ("lr", "min_lr")

    def arm(self, arm: Arm) -> dict[str, Any] | None:
        """Return the arm's arguments that are not at their default."""
        scaled = arm.initialization in ("scaled", "upstream")  # Megatron's default is scaled
        if arm.init_fn or arm.scheme.name not in (PRE_LN.name, LNS.name) or arm.initialization == "depth_scaled":
            return None
        if arm.scheme.is_pre_ln:
            return {} if scaled else {"no_scaled_init": True}
        exponent = arm.scheme.parameters["exponent"]
        return (
            {"layernorm_scaling": True}
            | ({"layernorm_scaling_exponent": exponent} if exponent != DEFAULT_EXPONENT else {})
            | ({"layernorm_scaling_keep_scaled_init": True} if scaled else {})
        )

    def defining(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: default if settings.get(key) is None else settings[key] for key, default in DEFAULTS.items()}
        return found | {"layernorm_scaling_exponent": float(found["layernorm_scaling_exponent"])}

    def identity(self, name: str, seed: int) -> dict[str, Any]:
        return {"seed": seed}

    def rate(self, config: Path, rate: float) -> dict[str, Any]:
        found = read(config)
        return {"lr": rate, "min_lr": float(f"{rate * float(found['min_lr']) / float(found['lr']):.6g}")}

    def load(self, path: Path, overrides: Mapping[str, Any]) -> Any:
        """Return the file's settings with the overrides."""
        return read(path) | {key.replace("-", "_"): value for key, value in overrides.items()}

    def derived(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        groups = settings.get("num_query_groups") if settings.get("group_query_attention") else None
        tensor = int(settings.get("tensor_model_parallel_size") or 1)
        # The padded vocabulary: the tokenizer's size up to the next multiple of divisible-by × TP.
        multiple = int(settings.get("make_vocab_size_divisible_by") or 128) * tensor
        return {
            "kv_heads": int(groups or settings["num_attention_heads"]),
            "vocabulary": -(-int(settings["vocab_size"]) // multiple) * multiple,
            "tied": not settings.get("untie_embeddings_and_output_weights"),
            "gain": True,
            "warmup": int(settings.get("lr_warmup_iters") or 0),
            "micro_batch": int(settings.get("micro_batch_size") or 1),
            "split": tensor * int(settings.get("pipeline_model_parallel_size") or 1),
        }

    def problems(self, settings: Mapping[str, Any], gpus: int) -> list[str]:
        decay, steps = settings.get("lr_decay_iters"), self.shape(settings).steps
        found = [] if decay in (None, steps) else [f"lr-decay-iters {decay} is not train-iters {steps}"]
        if available():
            try:
                parse(to_flags(settings, placeholder=True), gpus)
            except LNSConfigError as error:
                found.append(str(error))
        return found

    def unchecked(self) -> str:
        return "" if available() else "not parsed by Megatron: set MEGATRON_LM_SRC to a checkout"

    def words(self, run: Run, folder: Path) -> list[str]:
        own = read(run.config)
        for key, value in run.overrides.items():
            if _omitted(value) and not _omitted(own.get(key.replace("-", "_"))):
                raise LNSConfigError(
                    f"run {run.name}: {key}: {value} has no form on Megatron's command line: remove the key from "
                    f"{run.config}, and set it for the sizes or arms that need it"
                )
        words = ["--lns-config", str(run.config.resolve()), *to_flags(run.overrides)]
        return [*words, "--save", str(folder), "--load", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]

    def variables(self, run: Run) -> dict[str, str]:
        return variables(to_flags(run.settings, placeholder=True))

    def used(self, folder: Path) -> dict[str, Any]:
        """Return the ``arguments`` block that Megatron printed in the latest log with one."""
        found: dict[str, str] = {}
        for path in sorted(folder.glob("*.log")):
            _, _, block = path.read_text(encoding="utf-8", errors="replace").partition("- arguments -")
            block, end, _ = block.partition("- end of arguments -")
            found = dict(ARGUMENT.findall(block)) if end else found
        words = {"True": True, "False": False, "None": None}
        return {key: words.get(value.strip(), value.strip()) for key, value in found.items()}
