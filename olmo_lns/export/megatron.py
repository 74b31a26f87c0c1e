"""Megatron's distributed checkpoints (``torch_dist``): folded in place, or read as an OLMo model.

Layers lie stacked along a first axis (``decoder.layers.mlp.linear_fc1.weight`` of shape [L, …])
or under their number (``decoder.layers.7.mlp…``). ``linear_qkv`` is grouped by key head: each
group holds its query heads, then one key and one value head. ``linear_fc1`` is [gate, up].
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.architecture import Architecture
from olmo_lns.export.common_state import COMMON, COMMON_OBJECT, common_bytes, load_common
from olmo_lns.export.distributed import METADATA, DistributedCheckpoint
from olmo_lns.export.fold import LazyTensor, Rounding, check_shapes, scaled
from olmo_lns.export.jobs import fold_record, huggingface_job
from olmo_lns.export.megatron_architecture import architecture
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.record import LNSRecord
from olmo_lns.scale import lns_scale

__all__ = ["MegatronCheckpoint", "is_megatron", "job"]

_TRACKER = "latest_checkpointed_iteration.txt"
#: Parameters of the two norms of a block, in every spec that LNS can be applied to.
_SITE = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?"
    r"(?:self_attention\.linear_qkv\.layer_norm_|self_attention\.linear_qkv_down_proj\.layer_norm_"
    r"|mlp\.linear_fc1\.layer_norm_|input_layernorm\.|pre_mlp_layernorm\.)(?P<part>weight|bias)$"
)
_ANY_GAIN = re.compile(r"(?:layer_norm_weight|norm\.weight)$")
#: Entries that belong to training, not to the model.
_TRAINING = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b")


def is_megatron(folder: Path) -> bool:
    if (folder / _TRACKER).is_file() or any(folder.glob("iter_*")):
        return True
    return (folder / COMMON).is_file() or all((folder / name).is_file() for name in (METADATA, "metadata.json"))


@dataclass(frozen=True)
class MegatronCheckpoint:
    """One iteration of a Megatron run.

    :param common: the common state; ``common["args"]`` are the arguments of the run.
    """

    folder: Path
    common: dict[str, Any]
    record: LNSRecord
    state: DistributedCheckpoint

    @classmethod
    def open(cls, folder: Path) -> MegatronCheckpoint:
        """Read arguments and metadata and find the block norms; load no weight.

        :raises LNSConfigError: damaged, another format, without arguments, or not a plain transformer.
        """
        folder = _iteration(folder)
        state = DistributedCheckpoint(folder)
        content = None if (folder / COMMON).is_file() else state.object(COMMON_OBJECT)
        common = load_common(folder / (COMMON if content is None else COMMON_OBJECT), content)
        record = Settings.of(common["args"]).record(common["args"])
        checkpoint = cls(folder, common, record, state)
        checkpoint._check_sites()
        return checkpoint

    @property
    def args(self) -> Any:
        return self.common["args"]

    @property
    def names(self) -> list[str]:
        """Names of the model's own tensors."""
        return [name for name in self.state.names if not _TRAINING.match(name)]

    @property
    def shift(self) -> float:
        """What is added to a stored gain: 1 when gains are zero-centred."""
        return 1.0 if getattr(self.args, "apply_layernorm_1p", False) else 0.0

    def sites(self) -> Iterator[tuple[str, int | None]]:
        """Name of each parameter of a block norm, and its 0-based layer (None: all layers, stacked)."""
        for name in self.names:
            if match := _SITE.match(name):
                yield name, None if match["layer"] is None else int(match["layer"])

    def _check_sites(self) -> None:
        layers = int(self.args.num_layers)
        found = 0
        for name, layer in self.sites():
            if name.endswith("weight"):
                found += 1 if layer is not None else self.state.tensor(name).shape[0]
        if found != 2 * layers:
            raise LNSConfigError(
                f"{self.folder}: found {found} block norms in {layers} layers, expected {2 * layers}: only a plain "
                "transformer decoder (attention and MLP or MoE in every layer) can be folded"
            )
        if foreign := [name for name in self.names if re.search(r"\b(mtp|mixer|cross_attention)\b", name)]:
            raise LNSConfigError(
                f"{self.folder}: {foreign[0]} is of a layer that cannot be folded (MTP, Mamba or cross)"
            )

    def scaler(self, name: str, layer: int | None, scale: Callable[[int], float], rounding: Rounding) -> Any:
        """A function for :meth:`DistributedCheckpoint.rewrite` that multiplies each layer by its factor.

        :param scale: 1-based layer number -> factor.
        """
        shift = self.shift if name.endswith("weight") else 0.0

        def function(_: str, offsets: tuple[int, ...], chunk: torch.Tensor) -> torch.Tensor:
            if layer is not None:
                return rounding.scale(name, chunk, scale(layer + 1), chunk.dtype, shift)
            numbers = range(offsets[0] + 1, offsets[0] + 1 + len(chunk))
            return torch.stack(
                [rounding.scale(name, r, scale(n), r.dtype, shift) for n, r in zip(numbers, chunk, strict=True)]
            )

        return function

    def write(self, out: Path, scale: Callable[[int], float], rounding: Rounding, **args: Any) -> None:
        """Write the model, block norms times ``scale``, without optimizer and training state.

        Zero-centred gains are written as plain gains: s·(1+g) - 1 would lose up to a percent in
        bf16. ``args`` are changes of the saved arguments.
        """
        functions = {name: self.scaler(name, layer, scale, rounding) for name, layer in self.sites()}
        if self.shift:
            for name in self.names:
                if _ANY_GAIN.search(name) and name not in functions:
                    functions[name] = lambda n, _, chunk: rounding.scale(n, chunk, 1.0, chunk.dtype, 1.0)
        kept = {key: value for key, value in self.common.items() if not _TRAINING.match(key)}
        changed = argparse.Namespace(**{**vars(self.args), **args, "apply_layernorm_1p": False})
        folder, common = out / self.folder.name, kept | {"args": changed}
        objects = {COMMON_OBJECT: common_bytes(common)}
        self.state.rewrite(folder, lambda name: not _TRAINING.match(name), functions, objects)
        (folder / "metadata.json").write_bytes((self.folder / "metadata.json").read_bytes())
        if COMMON_OBJECT not in self.state.metadata.state_dict_metadata:
            torch.save(common, folder / COMMON)
        iteration = self.folder.name.removeprefix("iter_").lstrip("0") or "0"
        (out / _TRACKER).write_text(iteration, encoding="utf-8")

    def as_olmo(self) -> tuple[Architecture, dict[str, LazyTensor]]:
        """The same model as OLMo would hold it, not folded: its config and weights.

        :raises LNSConfigError: an argument that OLMo has no equivalent for, or unexpected weights.
        """
        model = architecture(self.args, self.state.tensor("embedding.word_embeddings.weight").shape[0], self.folder)
        weights, used = {}, set()

        def take(name: str, layer: int | None = None) -> LazyTensor:
            numbered = name if layer is None else name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            stored = numbered if numbered in self.state.names else name
            used.add(stored)
            return self.state.tensor(stored, None if stored == numbered else layer)

        def gain(name: str, layer: int | None = None) -> LazyTensor:
            tensor = take(name, layer)
            return tensor.map(lambda t: t + 1) if self.shift else tensor

        weights["transformer.wte.weight"] = take("embedding.word_embeddings.weight")
        parts = ("weight", "bias") if model.norm_bias else ("weight",)
        norm = {"weight": gain, "bias": take}
        for layer in range(model.n_layers):
            block, layers = f"transformer.blocks.{layer}", "decoder.layers"
            for part in parts:
                weights[f"{block}.attn_norm.{part}"] = norm[part](
                    f"{layers}.self_attention.linear_qkv.layer_norm_{part}", layer
                )
                weights[f"{block}.ff_norm.{part}"] = norm[part](f"{layers}.mlp.linear_fc1.layer_norm_{part}", layer)
            qkv = take(f"{layers}.self_attention.linear_qkv.weight", layer)
            weights[f"{block}.att_proj.weight"] = qkv.map(lambda t: ungroup(t, model))
            weights[f"{block}.attn_out.weight"] = take(f"{layers}.self_attention.linear_proj.weight", layer)
            fc1 = take(f"{layers}.mlp.linear_fc1.weight", layer)
            weights[f"{block}.ff_proj.weight"] = fc1.map(lambda t: torch.cat(t.chunk(2)[::-1]))
            weights[f"{block}.ff_out.weight"] = take(f"{layers}.mlp.linear_fc2.weight", layer)
        for part in parts:
            weights[f"transformer.ln_f.{part}"] = norm[part](f"decoder.final_layernorm.{part}")
        if not model.weight_tying:
            weights["transformer.ff_out.weight"] = take("output_layer.weight")
        if left := sorted(set(self.names) - used):
            raise LNSConfigError(f"{self.folder}: no stock class has a place for {left[0]} (and {len(left) - 1} more)")
        check_shapes(weights, model.shapes(), self.folder)
        return model, weights


def ungroup(qkv: torch.Tensor, model: Architecture) -> torch.Tensor:
    """Megatron's rows, grouped by key head, in OLMo's order: all queries, all keys, all values."""
    per_group = model.n_heads // model.kv_heads
    grouped = qkv.view(model.kv_heads, per_group + 2, model.head_dim, qkv.shape[-1])
    parts = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    return torch.cat([part.reshape(-1, qkv.shape[-1]) for part in parts])


def job(
    source: Path, args: argparse.Namespace, dtype: torch.dtype | None, rounding: Rounding
) -> Callable[[Path], list[str]]:
    """``olmo-lns export`` from a Megatron checkpoint.

    :raises LNSConfigError: refused.
    """
    checkpoint = MegatronCheckpoint.open(source)
    record = fold_record(checkpoint.record)

    def scale(number: int) -> float:
        return lns_scale(number, exponent=checkpoint.record.exponent) if checkpoint.record.active else 1.0

    if args.format == "hf":
        model, weights = checkpoint.as_olmo()
        factors = {name: scale(index + 1) for index in range(model.n_layers) for name in model.sites(index)}
        plain = scaled(weights, factors, rounding, dtype)
        return huggingface_job(model, plain, record, args, args.tokenizer, checkpoint.folder)
    if args.format != "megatron":
        raise LNSConfigError(f"{source} is a Megatron checkpoint: give --format megatron or hf")
    if dtype is not None:
        raise LNSConfigError("--dtype is for --format hf: Megatron loads weights in the dtype of its own flags")
    if not checkpoint.record.active:
        state = "folded already" if checkpoint.record.folded else "Pre-LN"
        raise LNSConfigError(f"{source} is {state}: there is nothing to fold")

    def write(out: Path) -> list[str]:
        changes = {"layernorm_scaling": False, "layernorm_scaling_folded": True}
        checkpoint.write(out, scale, rounding, **changes, layernorm_scaling_exponent=record.exponent)
        lines = [f"Megatron torch_dist, {checkpoint.folder.name}: load it with --finetune, without --layernorm-scaling"]
        if checkpoint.shift:
            lines.append("zero-centred gains were written as plain gains: run without --apply-layernorm-1p")
        return lines

    return write


def _iteration(folder: Path) -> Path:
    """The folder of one iteration: ``folder`` itself, or the latest one in it."""
    if (folder / _TRACKER).is_file():
        latest = (folder / _TRACKER).read_text(encoding="utf-8").strip()
        folder = folder / (latest if latest == "release" else f"iter_{int(latest):07d}" if latest.isdigit() else latest)
    if (folder / METADATA).is_file():
        return folder
    if any(folder.glob("mp_rank_*")):
        raise LNSConfigError(f"{folder} is in Megatron's legacy format: save it with --ckpt-format torch_dist")
    raise LNSConfigError(f"{folder} has no {METADATA}: it is not a complete torch_dist checkpoint")
