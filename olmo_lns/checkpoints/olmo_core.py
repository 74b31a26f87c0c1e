"""OLMo-core checkpoints, opened and checked without OLMo-core: a ``config.json`` beside a distributed checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from olmo_lns.checkpoints import METADATA, open_distributed, read_json
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo_core.config import CLASS, CONFIG_FILE, scheme_of_config
from olmo_lns.record import RECORD_FILE, Record
from olmo_lns.schemes import LNS, Scheme

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint


#: Folder of the weights inside a checkpoint of OLMo-core's trainer.
WEIGHTS = "model_and_optim"
#: Of the weights' names there.
PREFIX = "model."
#: OLMo-core's own LNS blocks, and the buffer that holds their factor.
DEFAULT_SCALED, BUFFER = "default_scaled", "ln_scale"
#: Block type -> the norms that a scheme multiplies there, with the sub-layer and the factor's name in its plan.
_NORMS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "default": (("attention_norm", "attn", "norm_scale"), ("feed_forward_norm", "ff", "norm_scale")),
    "reordered_norm": (("attention_norm", "attn", "branch_scale"), ("feed_forward_norm", "ff", "branch_scale")),
    "peri_norm": (("post_attention_norm", "attn", "branch_scale"), ("post_feed_forward_norm", "ff", "branch_scale")),
}
_NORMS |= {"moe": _NORMS["default"], "moe_reordered_norm": _NORMS["reordered_norm"]}
_NORMS["moe_hybrid"] = (*_NORMS["default"], ("feed_forward_moe_norm", "ff", "norm_scale"))
_NORMS["moe_hybrid_reordered_norm"] = (*_NORMS["reordered_norm"], ("feed_forward_moe_norm", "ff", "branch_scale"))


def is_olmo_core(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and _weights_folder(folder) is not None


def _weights_folder(folder: Path) -> Path | None:
    return next((path for path in (folder / WEIGHTS, folder) if (path / METADATA).is_file()), None)


@dataclass(frozen=True)
class OLMoCoreCheckpoint:
    """A checkpoint folder whose config, record and weights agree.

    :param config: the whole config.json. :param record: ``lns.json``, or what the config says.
    """

    folder: Path
    config: Mapping[str, Any]
    record: Record

    @classmethod
    def open(cls, folder: str | Path) -> OLMoCoreCheckpoint:
        """:raises LNSConfigError: damaged, incomplete, contradictory, or of a kind that is not supported."""
        folder = Path(folder)
        path = folder / CONFIG_FILE
        config = read_json(path)
        if not isinstance(config.get("model"), dict):
            raise LNSConfigError(f"{path} has no section 'model': it is not the config.json of an OLMo-core run")
        said = Record(scheme_of_config(config, source=path), *_norm_of(config))
        record = Record.read(folder) or said
        if record.active != said.active or (record.active and record.scheme != said.scheme):
            raise LNSConfigError(
                f"{folder}: {CONFIG_FILE} says {said}, {RECORD_FILE} says {record}: they contradict each other, one "
                "of them was changed after the checkpoint was written"
            )
        checkpoint = cls(folder, config, record)
        if checkpoint.default_scaled:
            return replace(checkpoint, record=checkpoint.record_of_buffers())
        return checkpoint

    @property
    def model(self) -> dict[str, Any]:
        """The model's section of the config."""
        section: dict[str, Any] = self.config["model"]
        return section

    @cached_property
    def blocks(self) -> list[dict[str, Any]]:
        """The config of every block, in order."""
        block, count = self.model["block"], int(self.model["n_layers"])
        if pattern := self.model.get("block_pattern"):
            return [block[name] for name in islice(cycle(pattern), count)]
        overrides = self.model.get("block_overrides") or {}
        return [overrides.get(str(index), block) for index in range(count)]

    @cached_property
    def default_scaled(self) -> bool:
        """Whether the blocks are OLMo-core's own LNS, whose factor is a buffer that init_weights overwrites."""
        return any(block.get("name") == DEFAULT_SCALED for block in self.blocks)

    def record_of_buffers(self) -> Record:
        """What a ``default_scaled`` model was trained with, as far as its buffers tell.

        Without any it was trained by an OLMo-core whose block keeps the factor as a Python float, which nothing
        overwrites: DepthBench's, and OLMo-core's with its pull request 698.

        :raises LNSConfigError: not LNS: the values that were found, and what they mean.
        """
        names = [f"blocks.{index}.{BUFFER}" for index in range(len(self.blocks))]
        present = [name for name in names if name in self._all]
        if present and len(present) < len(names):
            raise LNSConfigError(
                f"{self.folder}: {len(present)} of {len(names)} blocks have a factor {BUFFER}: expected one in each or "
                "none; the checkpoint is damaged or was put together from two"
            )
        wanted = [(index + 1) ** -0.5 for index in range(len(names))]
        values = [float(self._all[name].load()) for name in present] or wanted
        if all(abs(value - right) <= 1e-6 * right for value, right in zip(values, wanted, strict=True)):
            norm = (self.blocks[0].get("layer_norm") or {}).get("name", "default")
            plain = self.model.get("init_method", "normal") in ("normal", "fan_in")
            return Record(LNS, str(norm), "plain" if plain else "upstream")
        found = ", ".join(f"{value:.3g}" for value in values)
        raise LNSConfigError(
            f"{self.folder} was trained with block.name={DEFAULT_SCALED}, whose factors are buffers that OLMo-core's "
            f"init_weights overwrites: found {found}, expected {', '.join(f'{value:.3g}' for value in wanted)}. It was "
            f"not trained with LayerNorm Scaling (1 in each is Pre-LN). Train it again "
            f"with {CLASS}."
        )

    @cached_property
    def stored(self) -> DistributedCheckpoint:
        folder = _weights_folder(self.folder)
        if folder is None:
            raise LNSConfigError(f"{self.folder} holds no {WEIGHTS}/{METADATA}: the checkpoint is not complete")
        return open_distributed(folder)

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """The model's weights, under the names of its state dict; no factor of ``default_scaled`` blocks."""
        return {name: tensor for name, tensor in self._all.items() if not name.endswith(f".{BUFFER}")}

    @cached_property
    def _all(self) -> dict[str, LazyTensor]:
        names = [name for name in self.stored.names if name.startswith(PREFIX)]
        if not names:
            raise LNSConfigError(f"{self.folder}: no weight is named {PREFIX}…: not a checkpoint of a language model")
        return {name.removeprefix(PREFIX): self.stored.tensor(name) for name in names}

    def factors(self) -> dict[str, float]:
        """Parameter -> factor, for every gain and bias of a norm that carries one; empty where there is none."""
        return self.factors_of(self.record.scheme) if self.record.active else {}

    def factors_of(self, scheme: Scheme) -> dict[str, float]:
        """:meth:`factors` under ``scheme``, also where the checkpoint does not have it outside its weights.

        :raises LNSConfigError: such a norm has neither gain nor bias.
        """
        count, result = len(self.blocks), {}
        for index, block in enumerate(self.blocks):
            if not block.get("scale_router", True):
                raise LNSConfigError(f"{self.folder}: scale_router=false cannot be folded into norms alone")
            for norm, sub_layer, field in _NORMS[block_type(block)]:
                factor = getattr(scheme.plan(index + 1, count, sub_layer), field)
                names = [f"blocks.{index}.{norm}.{part}" for part in ("weight", "bias")]
                found = [name for name in names if name in self.tensors]
                if not found:
                    raise LNSConfigError(f"{self.folder}: {names[0]} is missing: a norm without gain cannot be folded")
                result.update(dict.fromkeys(found, factor))
        return result


def block_type(block: Mapping[str, Any]) -> str:
    name = str(block.get("name", "default"))
    if name == DEFAULT_SCALED:
        return "default"
    if name not in _NORMS:
        raise LNSConfigError(f"block type {name}: this version of olmo-lns does not know where its norms are")
    return name


def _norm_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """The block norm and the initialization of a config with a scheme."""
    from olmo_lns.integrations.olmo_core.config import blocks_of

    block = next(iter(blocks_of(config)), {})
    if block.get("_CLASS_") != CLASS:
        return "", "upstream"
    return str((block.get("layer_norm") or {}).get("name", "default")), str(block.get("initialization") or "plain")
