"""Megatron's distributed checkpoints (``torch_dist``): opened and checked, or read as an OLMo model.

Layers lie stacked along a first axis (``decoder.layers.mlp.linear_fc1.weight`` of shape [L, …])
or under their number (``decoder.layers.7.mlp…``). ``linear_qkv`` is grouped by key head: each
group holds its query heads, then one key and one value head. ``linear_fc1`` is [gate, up].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch

from olmo_lns.checkpoints import METADATA, open_distributed
from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.common_state import COMMON, COMMON_OBJECT, load_common
from olmo_lns.checkpoints.megatron_architecture import architecture, gain_shift
from olmo_lns.checkpoints.tensors import LazyTensor, check_shapes, join_rows, split_rows
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.addition import SLOTS
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.record import Record
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Scheme

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

__all__ = ["OWN", "TRACKER", "TRAINING", "MegatronCheckpoint", "Take", "is_megatron", "saved_args"]

TRACKER = "latest_checkpointed_iteration.txt"
#: Parameters of the two norms of a block, in every spec that LNS can be applied to.
_SITE = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?"
    r"(?:self_attention\.linear_qkv\.layer_norm_|self_attention\.linear_qkv_down_proj\.layer_norm_"
    r"|mlp\.linear_fc1\.layer_norm_|input_layernorm\.|pre_mlp_layernorm\.)(?P<part>weight|bias)$"
)
#: Entries that belong to training, not to the model.
TRAINING = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b")

#: A parameter of a scheme's residual addition; a stock model has none.
OWN = re.compile(rf"decoder\.layers\.(?:\d+\.)?(?:{'|'.join(SLOTS.values())})\.")
#: (name with all layers stacked, 0-based layer) -> its tensor.
Take = Callable[[str, int], LazyTensor]


def is_megatron(folder: Path) -> bool:
    if (folder / TRACKER).is_file() or any(folder.glob("iter_*")):
        return True
    named = folder.name.startswith("iter_") and (folder / METADATA).is_file()
    return named or (folder / COMMON).is_file() or all((folder / n).is_file() for n in (METADATA, "metadata.json"))


@dataclass(frozen=True)
class MegatronCheckpoint:
    """One iteration of a Megatron run.

    :param common: the common state; ``common["args"]`` are the arguments of the run.
    """

    folder: Path
    common: dict[str, Any]
    record: Record
    state: DistributedCheckpoint

    @classmethod
    def open(cls, folder: Path) -> MegatronCheckpoint:
        """Read arguments and metadata and find the block norms; load no weight.

        :raises LNSConfigError: damaged, another format, without arguments, or not a plain transformer.
        """
        folder = _iteration(folder)
        state = open_distributed(folder)
        common = _common(folder, state)
        try:
            record = Settings.of(common["args"]).record(common["args"])
        except LNSConfigError as error:
            raise LNSConfigError(f"{folder}: {error}") from None
        checkpoint = cls(folder, common, record, state)
        checkpoint._check_sites()
        return checkpoint

    @property
    def args(self) -> Any:
        return self.common["args"]

    @property
    def names(self) -> list[str]:
        """Names of the model's own tensors."""
        return [name for name in self.state.names if not TRAINING.match(name)]

    @property
    def shift(self) -> float:
        """What is added to a stored gain: 1 when gains are zero-centred."""
        return gain_shift(self.args, self.folder)

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

    @property
    def addition(self) -> Scheme:
        """The scheme of the residual additions; Pre-LN where they are stock, as under LayerNorm Scaling."""
        scheme = self.record.scheme
        stock = not self.record.active or scheme.keeps_forward(int(self.args.num_layers))
        return PRE_LN if stock else scheme

    def take(self, name: str, layer: int | None = None) -> LazyTensor:
        """A tensor, or one layer of it, by its name with all layers stacked."""
        stored = self.stored(name, layer)
        return self.state.tensor(stored, None if stored != name else layer)

    def stored(self, name: str, layer: int | None = None) -> str:
        """The name in this checkpoint of what may lie under its layer's number."""
        numbered = name if layer is None else name.replace("decoder.layers.", f"decoder.layers.{layer}.")
        return numbered if numbered in self.state.names else name

    def as_olmo(self) -> tuple[Architecture, dict[str, LazyTensor]]:
        """The same model as OLMo would hold it, not folded: its config and weights.

        :raises LNSConfigError: an argument that OLMo has no equivalent for, or unexpected weights.
        """
        rows = self.state.tensor("embedding.word_embeddings.weight").shape[0]
        model = architecture(self.args, rows, self.folder, self.addition)
        weights, used = {}, set()

        def take(name: str, layer: int | None = None) -> LazyTensor:
            used.add(self.stored(name, layer))
            return self.take(name, layer)

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
            half = fc1.shape[0] // 2
            gate, up = split_rows(fc1, (half, fc1.shape[0] - half))
            weights[f"{block}.ff_proj.weight"] = join_rows(up, gate)
            weights[f"{block}.ff_out.weight"] = take(f"{layers}.mlp.linear_fc2.weight", layer)
        weights.update(_own_weights(self.addition, model.n_layers, take, gain, parts))
        for part in parts:
            weights[f"transformer.ln_f.{part}"] = norm[part](f"decoder.final_layernorm.{part}")
        if not model.weight_tying:
            weights["transformer.ff_out.weight"] = take("output_layer.weight")
        if left := sorted(set(self.names) - used):
            raise LNSConfigError(f"{self.folder}: no stock class has a place for {left[0]} (and {len(left) - 1} more)")
        check_shapes(weights, model.shapes(), self.folder)
        return model, weights


def _own_weights(scheme: Scheme, n_layers: int, take: Take, gain: Take, parts: tuple[str, ...]) -> Iterator[Any]:
    """``(OLMo's name, tensor)`` of what the scheme adds to the weights of a Pre-LN model.

    :param gain: as ``take``, for gains that may be stored minus one. :param parts: of a norm.
    """
    for index in range(n_layers):
        for sub_layer in SUB_LAYERS:
            ours, theirs = f"transformer.blocks.{index}.{sub_layer}", f"decoder.layers.{SLOTS[sub_layer]}"
            plan = scheme.plan(index + 1, n_layers, sub_layer)
            if plan.gate is not None:
                yield f"{ours}_gate.weight", take(f"{theirs}.gate", index)
            for part in parts if plan.branch else ():
                yield f"{ours}_norm_out.{part}", (gain if part == "weight" else take)(f"{theirs}.norm.{part}", index)


def ungroup(qkv: torch.Tensor, model: Architecture) -> torch.Tensor:
    """Megatron's rows, grouped by key head, in OLMo's order: all queries, all keys, all values."""
    per_group = model.n_heads // model.kv_heads
    grouped = qkv.view(model.kv_heads, per_group + 2, model.head_dim, qkv.shape[-1])
    parts = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    return torch.cat([part.reshape(-1, qkv.shape[-1]) for part in parts])


def saved_args(folder: Path) -> Any:
    """The arguments of the run that saved the latest iteration in ``folder``. :raises LNSConfigError: damaged."""
    folder = _iteration(folder)
    return _common(folder, open_distributed(folder))["args"]


def _common(folder: Path, state: DistributedCheckpoint) -> dict[str, Any]:
    content = None if (folder / COMMON).is_file() else state.object(COMMON_OBJECT)
    return load_common(folder / (COMMON if content is None else COMMON_OBJECT), content)


def _iteration(folder: Path) -> Path:
    """The folder of one iteration: ``folder`` itself, or the latest one in it."""
    if (folder / TRACKER).is_file():
        latest = (folder / TRACKER).read_text(encoding="utf-8").strip()
        folder = folder / (latest if latest == "release" else f"iter_{int(latest):07d}" if latest.isdigit() else latest)
    if (folder / METADATA).is_file() and ((folder / COMMON).is_file() or (folder / "metadata.json").is_file()):
        return folder
    if (folder / METADATA).is_file():
        raise LNSConfigError(
            f"{folder} has neither metadata.json nor {COMMON}: it is in Megatron's torch_dcp or fsdp_dtensor format, "
            "or torch_dist without its arguments; load it in Megatron and save it with --ckpt-format torch_dist"
        )
    if any(folder.glob("mp_rank_*")):
        raise LNSConfigError(f"{folder} is in Megatron's legacy format: save it with --ckpt-format torch_dist")
    raise LNSConfigError(f"{folder} has no {METADATA}: it is not a complete torch_dist checkpoint")
