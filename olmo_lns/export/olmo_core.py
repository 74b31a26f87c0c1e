"""OLMo-core checkpoints written with the factor folded into their norms.

What a folded checkpoint names is OLMo-core's own block config, so that it runs where this package is not installed.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

from olmo_lns import __version__
from olmo_lns.checkpoints.olmo_core import DEFAULT_SCALED, PREFIX, WEIGHTS, OLMoCoreCheckpoint
from olmo_lns.checkpoints.tensors import ChunkFunction
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.olmo import chunk_scaler
from olmo_lns.export.options import HF, Options, Target
from olmo_lns.integrations.olmo_core.record import CLASS, CONFIG_FILE

__all__ = ["stock_config", "target", "with_blocks"]

_STOCK_CLASS = "olmo_core.nn.transformer.config.TransformerBlockConfig"
_OURS = ("scheme", "exponent", "initialization", "scale_router")


def stock_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with OLMo-core's own plain block configs, at every depth."""
    return with_blocks(config, {"_CLASS_": _STOCK_CLASS})


def with_blocks(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with ``fields`` in every plain block config, at every depth, in place of a scheme's."""

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(item) for item in value]
        if not isinstance(value, dict):
            return value
        made = {key: visit(item) for key, item in value.items()}
        if made.get("_CLASS_") in (CLASS, _STOCK_CLASS) or made.get("name") == DEFAULT_SCALED:
            made = {key: item for key, item in made.items() if key not in _OURS} | dict(fields)
            if made.get("name") == DEFAULT_SCALED:
                made["name"] = "default"
        return made

    result: dict[str, Any] = visit(copy.deepcopy(dict(config)))
    return result


def target(source: Path, options: Options) -> Target:
    """What ``olmo-lns export`` does with an OLMo-core checkpoint.

    :raises LNSError: the format cannot hold this model, or there is nothing to fold.
    """
    checkpoint = OLMoCoreCheckpoint.open(source)
    options.require_exponent(checkpoint.record, source)
    dtype, rounding = options.dtype, options.rounding
    record = replace(
        checkpoint.record, folded=checkpoint.record.folded or checkpoint.record.active, plugin_version=__version__
    )
    if options.format == HF:
        from olmo_lns.export.olmo_core_huggingface import huggingface_target

        return huggingface_target(checkpoint, record, options)
    if not checkpoint.record.active:
        state = "folded already" if checkpoint.record.folded else "without a scheme"
        raise LNSConfigError(f"{source} is {state}: there is nothing to fold, and stock OLMo-core runs it as it is")
    factors = checkpoint.factors()

    def write(out: Path) -> list[str]:
        functions: dict[str, ChunkFunction] = {}
        for name, tensor in checkpoint.tensors.items():
            if name in factors or (dtype is not None and dtype != tensor.dtype):
                functions[PREFIX + name] = chunk_scaler(name, factors.get(name, 1.0), rounding, dtype)
        checkpoint.stored.rewrite(
            out / WEIGHTS, lambda name: name.removeprefix(PREFIX) in checkpoint.tensors, functions
        )
        record.write(out)
        text = json.dumps(stock_config(checkpoint.config), indent=2)
        (out / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        return [
            f"OLMo-core, {len(checkpoint.blocks)} factors folded into gains and biases of the block norms",
            "the optimizer's state is left out: its moments belong to the unfolded weights",
        ]

    return write
