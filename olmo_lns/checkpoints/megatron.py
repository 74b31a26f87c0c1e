"""Megatron's distributed checkpoints (``torch_dist``): opened and checked, or read as an OLMo model.

Layers lie stacked along a first axis (``decoder.layers.mlp.linear_fc1.weight`` of shape [L, …])
or under their number (``decoder.layers.7.mlp…``). ``linear_qkv`` is grouped by key head: each
group holds its query heads, then one key and one value head. ``linear_fc1`` is [gate, up].

The saved arguments are in the common state: up to Megatron Core 0.18 the file ``common.pt``; from 0.19 an object in the
distributed checkpoint, a list of one. (0.19 still reads ``common.pt``, and then nothing else.)
"""

from __future__ import annotations

import argparse
import enum
import importlib
import io
import pathlib
import re
import signal
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

import torch

from olmo_lns.checkpoints import METADATA, open_distributed
from olmo_lns.checkpoints.olmo import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor, check_archive, join_rows, loading, split_rows
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.settings import SLOTS, ZERO_CENTRED, Settings
from olmo_lns.integrations.olmo.types import spell
from olmo_lns.record import Record
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Scheme

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
#: Plain value classes that arguments hold.
_SAFE: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": pathlib.PosixPath,
    "signal.Signals": signal.Signals,
}
#: Parameters of the two norms of a block, in every spec that LNS can be applied to.
_SITE = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?:(?P<attn>self_attention\.linear_qkv(?:_down_proj)?\.layer_norm_"
    r"|input_layernorm\.)|mlp\.linear_fc1\.layer_norm_|pre_mlp_layernorm\.)(?:weight|bias)$"
)
#: Every gain; where gains are zero-centred, the stored value is the gain minus one.
GAIN = re.compile(r"(?:layer_norm_weight|norm\.weight)$")
#: Entries that belong to training, not to the model.
TRAINING = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b")

#: A parameter of a scheme's residual addition; a stock model has none.
OWN = re.compile(rf"decoder\.layers\.(?:\d+\.)?(?:{'|'.join(SLOTS.values())})\.")
#: The names that the argument of ``--norm-epsilon`` has had.
_EPSILON = ("norm_epsilon", "layernorm_epsilon")

#: An argument with one of these values asks for nothing.
_NOTHING = (None, False, 0)
#: Argument -> the values under which the model is a plain decoder; an argument that is absent is fine.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    **dict.fromkeys(("num_experts", "multi_latent_attention", "mtp_num_layers", "add_bias_linear"), _NOTHING),
    **dict.fromkeys(("rotary_interleaved", "use_rope_scaling", "no_rope_freq", "add_qkv_bias"), _NOTHING),
    **dict.fromkeys(("qk_layernorm", "qk_l2_norm", "attention_output_gate", "window_size", "use_mup"), _NOTHING),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "experimental_attention_variant"), _NOTHING),
    **dict.fromkeys(("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"), _NOTHING),
    **dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern", "glu_linear_offset"), _NOTHING),
    **dict.fromkeys(("activation_func_clamp_value", "quick_geglu"), _NOTHING),
}


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
        layers, gains = int(checkpoint.args.num_layers), [s for s in checkpoint.sites() if s[0].endswith("weight")]
        found = sum(state.tensor(name).shape[0] if layer is None else 1 for name, layer, _ in gains)
        if found != 2 * layers:
            raise LNSConfigError(
                f"{folder}: found {found} block norms in {layers} layers, expected {2 * layers}: only a plain "
                "transformer decoder (attention and MLP or MoE in every layer) can be folded"
            )
        if foreign := [name for name in checkpoint.names if re.search(r"\b(mtp|mixer|cross_attention)\b", name)]:
            raise LNSConfigError(f"{folder}: {foreign[0]} is of a layer that cannot be folded (MTP, Mamba or cross)")
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

    def sites(self) -> Iterator[tuple[str, int | None, str]]:
        """Name of each parameter of a block norm, its 0-based layer (None: all layers, stacked) and sub-layer."""
        for name in self.names:
            if match := _SITE.match(name):
                layer = None if match["layer"] is None else int(match["layer"])
                yield name, layer, "attn" if match["attn"] else "ff"

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
            tensor = self.take(name, layer)
            return tensor.map(lambda t: t + 1) if self.shift and GAIN.search(name) else tensor

        weights["transformer.wte.weight"] = take("embedding.word_embeddings.weight")
        parts = ("weight", "bias") if model.norm_bias else ("weight",)
        readers = {"attn": "decoder.layers.self_attention.linear_qkv", "ff": "decoder.layers.mlp.linear_fc1"}
        for layer in range(model.n_layers):
            block = f"transformer.blocks.{layer}"
            for sub_layer in SUB_LAYERS:
                plan = self.addition.plan(layer + 1, model.n_layers, sub_layer)
                own = f"decoder.layers.{SLOTS[sub_layer]}"
                for part in parts:
                    weights[f"{block}.{sub_layer}_norm.{part}"] = take(f"{readers[sub_layer]}.layer_norm_{part}", layer)
                for part in parts if plan.branch else ():
                    weights[f"{block}.{sub_layer}_norm_out.{part}"] = take(f"{own}.norm.{part}", layer)
                if plan.gate is not None:
                    weights[f"{block}.{sub_layer}_gate.weight"] = take(f"{own}.gate", layer)
            qkv, fc1 = (take(f"{readers[sub_layer]}.weight", layer) for sub_layer in SUB_LAYERS)
            weights[f"{block}.att_proj.weight"] = qkv.map(lambda t: ungroup(t, model))
            weights[f"{block}.attn_out.weight"] = take("decoder.layers.self_attention.linear_proj.weight", layer)
            gate, up = split_rows(fc1, (half := fc1.shape[0] // 2, fc1.shape[0] - half))
            weights[f"{block}.ff_proj.weight"] = join_rows(up, gate)
            weights[f"{block}.ff_out.weight"] = take("decoder.layers.mlp.linear_fc2.weight", layer)
        for part in parts:
            weights[f"transformer.ln_f.{part}"] = take(f"decoder.final_layernorm.{part}")
        if not model.weight_tying:
            weights["transformer.ff_out.weight"] = take("output_layer.weight")
        if left := sorted(set(self.names) - used):
            raise LNSConfigError(f"{self.folder}: no stock class has a place for {left[0]} (and {len(left) - 1} more)")
        model.check_weights(weights, self.folder)
        return model, weights


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


class Absent:
    """Stands for a value of a Megatron class that is not installed here."""

    def __init__(self, *args: Any) -> None:
        self.value = args

    def __setstate__(self, state: Any) -> None:
        self.value = state


def load_common(path: Path, content: bytes | None = None) -> dict[str, Any]:
    """The common state, through ``weights_only=True``.

    Besides plain values only Megatron's own enumerations are admitted; where Megatron is not
    installed an inert stand-in takes their place, which is enough to read the arguments.

    :param path: ``common.pt``; with ``content``, what messages call it.
    :param content: the object of a distributed checkpoint.
    :raises LNSConfigError: missing, damaged, naming another class, or without arguments.
    """

    def source() -> Any:
        return path if content is None else io.BytesIO(content)

    check_archive(path, None if content is None else source())
    with loading(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source())
    allowed: list[Any] = [(_resolve(name, path), name) for name in names]
    with loading(path), torch.serialization.safe_globals(allowed):
        common = torch.load(source(), map_location="cpu", weights_only=True)
    if content is not None and isinstance(common, list) and len(common) == 1:
        common = common[0]
    if not isinstance(common, dict) or not hasattr(common.get("args"), "num_layers"):
        raise LNSConfigError(f"{path} holds no arguments: nobody can tell how the model was built or if it is LNS")
    return common


def common_bytes(common: dict[str, Any]) -> bytes:
    """The common state as an object of a distributed checkpoint."""
    buffer = io.BytesIO()
    torch.save([common], buffer)
    return buffer.getvalue()


def _resolve(name: str, path: Path) -> Any:
    if name in _SAFE:
        return _SAFE[name]
    module, _, attribute = name.rpartition(".")
    if module.startswith("megatron.core"):
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            return Absent
        if isinstance(found, type) and issubclass(found, enum.Enum):
            return found
    raise LNSConfigError(f"{path} names the class {name}, which saved arguments have no need of: it is not loaded")


def architecture(args: Any, embeddings: int, source: object, scheme: Scheme = PRE_LN) -> Architecture:
    """The same model in OLMo's terms.

    :param embeddings: rows of the embedding, padding included. :param scheme: of blocks that have more than a
        Pre-LN model's weights.
    :raises LNSConfigError: an argument without equivalent, with all that stand in the way.
    """
    problems = [
        f"{name}={getattr(args, name)!r}"
        for name, values in _PLAIN.items()
        if hasattr(args, name) and getattr(args, name) not in values
    ]
    norm = str(getattr(args, "normalization", "LayerNorm"))
    if norm not in ("RMSNorm", "LayerNorm"):
        problems.append(f"normalization={norm!r}")
    heads = int(args.num_attention_heads)
    if (channels := getattr(args, "kv_channels", None)) not in (None, args.hidden_size // max(heads, 1)):
        problems.append(f"kv_channels={channels}")
    if problems:
        raise LNSConfigError(f"{source}: no stock transformers class computes this model: {', '.join(problems)}")
    base = "rms" if norm == "RMSNorm" else "default"
    groups = getattr(args, "num_query_groups", None) if getattr(args, "group_query_attention", True) else None
    return Architecture(
        d_model=int(args.hidden_size),
        n_heads=heads,
        n_kv_heads=int(groups) if groups else heads,
        n_layers=int(args.num_layers),
        mlp_hidden_size=2 * int(args.ffn_hidden_size),
        rope=True,
        rope_theta=float(getattr(args, "rotary_base", 10_000)),
        layer_norm_type=base if scheme.is_pre_ln else spell(scheme, base),
        layer_norm_eps=float(_given(args, _EPSILON, source)[0]),
        max_sequence_length=int(args.max_position_embeddings),
        include_bias=False,
        bias_for_layer_norm=norm == "LayerNorm",
        vocab_size=embeddings,
        embedding_size=embeddings,
        weight_tying=not getattr(args, "untie_embeddings_and_output_weights", False),
        # Megatron's arguments do not name them; the tokenizer does.
        eos_token_id=-1,
        pad_token_id=-1,
        init_std=float(getattr(args, "init_method_std", 0.02)),
    ).checked(source)


def gain_shift(args: Any, source: object) -> float:
    """What is added to a stored gain: 1 where the saved arguments say that gains are zero-centred.

    :raises LNSConfigError: they do not say it.
    """
    return 1.0 if any(_given(args, ZERO_CENTRED, source)) else 0.0


def _given(args: Any, names: tuple[str, ...], source: object) -> list[Any]:
    """The values of an argument that has had several names. A default in its place would be a guess."""
    found = [getattr(args, name) for name in names if getattr(args, name, None) is not None]
    if not found:
        raise LNSConfigError(
            f"{source}: the saved arguments hold neither {' nor '.join(names)}: expected one of them from "
            "every supported Megatron; this version's are not known to the exporter"
        )
    return found
