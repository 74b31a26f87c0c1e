"""Fold Megatron's distributed checkpoints (``torch_dist``) for stock Megatron, or open them as a Llama.

In such a checkpoint, the layers are either stacked along a first axis, so that
``decoder.layers.mlp.linear_fc1.weight`` has the shape [L, …], or they are numbered (``decoder.layers.7.mlp…``). The
rows of ``linear_qkv`` are grouped by key heads. Each group has its query heads, one key head and one value head, in
that order. The rows of ``linear_fc1`` are [gate, up]. Megatron saves its arguments in ``common.pt``. Since Megatron
Core 0.19, they are in an object of the distributed checkpoint.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import io
import json
import pathlib
import re
import signal
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import MEGATRON, huggingface
from olmo_lns.export.metadata import SafeReader, load_tensors, read_metadata
from olmo_lns.export.opened import Opened, reporting_load_errors
from olmo_lns.export.saved_weights import widest
from olmo_lns.folding import check_finite, multiplied
from olmo_lns.integrations.megatron.flags import Selection
from olmo_lns.schemes import LNS, PRE_LN, Scheme

TRACKER, COMMON, COMMON_OBJECT = "latest_checkpointed_iteration.txt", "common.pt", "common_state/shard_0_1"
#: Entries of a checkpoint that are the state of the training and not of the model.
_TRAINING = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b")
#: Parameters of the two norms of a block, in every layer spec that LNS supports.
_BLOCK_NORM = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?:self_attention\.linear_qkv(?:_down_proj)?\.layer_norm_|input_layernorm\."
    r"|mlp\.linear_fc1\.layer_norm_|pre_mlp_layernorm\.)(?P<part>weight|bias)$"
)
_ABSENT = (None, False, 0)
#: Argument -> the values that Llama can represent. An absent argument is accepted.
_LLAMA_VALUES: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    **dict.fromkeys(("num_experts", "multi_latent_attention", "mtp_num_layers", "add_bias_linear"), _ABSENT),
    **dict.fromkeys(("rotary_interleaved", "use_rope_scaling", "no_rope_freq", "add_qkv_bias"), _ABSENT),
    **dict.fromkeys(("qk_layernorm", "qk_l2_norm", "attention_output_gate", "window_size", "use_mup"), _ABSENT),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "experimental_attention_variant"), _ABSENT),
    **dict.fromkeys(("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"), _ABSENT),
    **dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern", "glu_linear_offset"), _ABSENT),
    **dict.fromkeys(("activation_func_clamp_value", "quick_geglu"), _ABSENT),
}
#: Plain value classes in saved arguments, apart from Megatron's enumerations.
_SAFE_CLASSES = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": pathlib.PosixPath,
    "signal.Signals": signal.Signals,
}


@dataclass
class Saved:
    """One saved iteration of a Megatron run.

    :param folder: folder of the iteration.
    :param common: the common state. ``common["args"]`` are the arguments of the run.
    :param tensors: name of each tensor of the model -> its size and dtype.
    :param objects: names of the other entries.
    """

    folder: Path
    common: dict[str, Any]
    tensors: dict[str, TensorStorageMetadata]
    objects: list[str]

    @property
    def args(self) -> Any:
        """The saved arguments of the run."""
        return self.common["args"]

    def scheme(self, requested: Scheme | None) -> Scheme:
        """Return the scheme in the saved arguments, or ``requested`` if they name none."""
        saved = Selection.of_saved(self.args).scheme
        if requested is None:
            return saved
        if requested.name not in (LNS.name, PRE_LN.name):
            raise LNSConfigError(f"--scheme {requested}: Megatron supports only lns. {self.folder} is a Megatron run.")
        if not saved.is_pre_ln and saved != requested:
            raise LNSConfigError(f"{self.folder} says scheme {saved}, --scheme says {requested}. Leave --scheme out.")
        return requested

    def argument(self, *names: str) -> Any:
        """Return the saved value of an argument, under the first of ``names`` that the arguments have.

        :raises LNSConfigError: if they have none. No default is assumed.
        """
        for name in names:
            if (value := getattr(self.args, name, None)) is not None:
                return value
        raise LNSConfigError(f"{self.folder}: the saved arguments have no {' or '.join(names)}. Expected one of them.")

    @property
    def shift(self) -> float:
        """The number that must be added to the stored weight of a norm, which is 1 for zero-centered weights."""
        return 1.0 if self.argument("layernorm_zero_centered_gamma", "apply_layernorm_1p") else 0.0

    def norm_parameters(self) -> Iterator[tuple[str, int | None, str]]:
        """Yield for each parameter of a block's norm: its name, its layer, and ``weight`` or ``bias``.

        The layer is counted from 0. It is None if the layers are stacked.
        """
        for match in filter(None, map(_BLOCK_NORM.match, self.tensors)):
            yield match[0], None if match["layer"] is None else int(match["layer"]), match["part"]

    def weights(self) -> dict[str, torch.Tensor]:
        """Load the unsharded tensors of the model on the CPU."""
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in self.tensors.items()}
        load_tensors(self.folder, state)
        return state


def read(folder: Path) -> Saved:
    """Read the arguments and the tensor names of one iteration, without loading weights.

    :param folder: folder of an iteration. For the folder of a run, its latest iteration is read.
    :raises LNSConfigError: if the folder has another format, a damaged file or no arguments, or if its layers cannot be
        folded.
    """
    if (folder / TRACKER).is_file():
        latest = (folder / TRACKER).read_text(encoding="utf-8").strip()
        folder = folder / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
    if not all((folder / name).is_file() for name in (".metadata", "metadata.json")):
        raise LNSConfigError(
            f"{folder} holds no complete torch_dist checkpoint. Load it in Megatron and save it with --ckpt-format "
            "torch_dist."
        )
    with reporting_load_errors(folder):
        metadata = read_metadata(folder).state_dict_metadata
        common = _common(folder)
    entries = {name: entry for name, entry in metadata.items() if not _TRAINING.match(name) and name != COMMON_OBJECT}
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    saved = Saved(folder, common, tensors, [name for name in entries if name not in tensors])
    layers = int(saved.args.num_layers)
    weights = [(name, layer) for name, layer, part in saved.norm_parameters() if part == "weight"]
    norms = sum(saved.tensors[name].size[0] if layer is None else 1 for name, layer in weights)
    unsupported = [name for name in saved.tensors if re.search(r"\b(mtp|mixer|cross_attention)\b", name)]
    if norms != 2 * layers or unsupported:
        raise LNSConfigError(
            f"{folder}: found {norms} block norms in {layers} layers, expected {2 * layers}; unsupported parameters: "
            f"{', '.join(unsupported[:1]) or 'none'}. Only a plain transformer decoder (attention and MLP or MoE in "
            "every layer, no MTP) can be folded."
        )
    return saved


class _KeepBytes(DefaultLoadPlanner):
    """Load objects as the bytes that were saved, without unpickling them."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


class _WriteBytes(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(object) if isinstance(object, bytes) else super().transform_object(write_item, object)


def _objects(folder: Path, names: list[str]) -> dict[str, bytes]:
    state: dict[str, Any] = dict.fromkeys(names)
    planner = _KeepBytes(flatten_state_dict=False, flatten_sharded_tensors=False)
    if names:
        dcp_load(state, storage_reader=SafeReader(folder), planner=planner, no_dist=True)
    return state


def _common(folder: Path) -> dict[str, Any]:
    """Load the common state with ``weights_only=True``. Only plain values and Megatron's enumerations are accepted.

    :raises LNSConfigError: if it contains another class, or no arguments.
    """
    path = folder / COMMON
    content = path.read_bytes() if path.is_file() else _objects(folder, [COMMON_OBJECT])[COMMON_OBJECT]
    names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    safe: dict[str, type] = dict(_SAFE_CLASSES)
    for name in names:
        if name.startswith("megatron.core."):
            module, _, attribute = name.rpartition(".")
            cls = getattr(importlib.import_module(module), attribute, None)
            if isinstance(cls, enum.EnumMeta):
                safe[name] = cls
    if unsafe := set(names) - set(safe):
        raise LNSConfigError(
            f"{path} names the class {min(unsafe)}. Expected plain values and enumerations of the installed Megatron "
            "Core: install the version that wrote the checkpoint."
        )
    # torch removes these entries at the end. Pairs with a name leave the classes that Megatron registered in place.
    with torch.serialization.safe_globals([(cls, name) for name, cls in safe.items()]):
        common = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if isinstance(common, list) and common:
        common = common[0]
    if not isinstance(common, dict) or not hasattr(common.get("args"), "num_layers"):
        raise LNSConfigError(f"{folder} holds no arguments. Expected the arguments of the training run.")
    return common


def save_folded(folder: Path, out: Path, scheme: Scheme | None = None) -> str:
    """Fold a checkpoint, and write one that stock Megatron loads with ``--finetune``.

    The state of the optimizer is not written.

    :param scheme: scheme of a checkpoint whose arguments name none.
    :returns: name of the folder of the iteration.
    :raises LNSConfigError: if there is nothing to fold, a value is not finite, or :func:`read` raises.
    """
    saved = read(folder)
    scheme = saved.scheme(scheme)
    if scheme.is_pre_ln:
        raise LNSConfigError(f"{folder} is Pre-LN, so there is nothing to fold. Use the checkpoint as it is.")
    layers, target = int(saved.args.num_layers), out / saved.folder.name
    factors = torch.tensor([scheme.plan(n, layers, "attn").norm_scale for n in range(1, layers + 1)]).double()
    state: dict[str, Any] = saved.weights()
    for name, layer, part in saved.norm_parameters():
        factor = factors if layer is None else float(factors[layer])
        state[name] = multiplied(state[name], factor, None, saved.shift if part == "weight" else 0.0)
    check_finite(state.items())
    common = {key: value for key, value in saved.common.items() if not _TRAINING.match(key)}
    args = {name: value for name, value in vars(saved.args).items() if name not in vars(Selection())}
    common["args"] = argparse.Namespace(**args)
    state |= _objects(saved.folder, saved.objects)
    target.mkdir(parents=True)
    if (saved.folder / COMMON).is_file():
        torch.save(common, target / COMMON)
    else:
        torch.save([common], buffer := io.BytesIO())
        state[COMMON_OBJECT] = buffer.getvalue()
    planner = _WriteBytes(flatten_state_dict=False)
    dcp_save(state, storage_writer=FileSystemWriter(target), planner=planner, no_dist=True)
    metadata = json.loads((saved.folder / "metadata.json").read_text(encoding="utf-8"))
    (target / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    iteration = saved.folder.name.removeprefix("iter_").lstrip("0") or "0"
    (out / TRACKER).write_text(iteration, encoding="utf-8")
    return saved.folder.name


def open_folder(folder: Path, scheme: Scheme | None = None) -> Opened:
    """Open a checkpoint as a Llama under its scheme.

    :param scheme: scheme of a checkpoint whose arguments name none.
    :raises LNSConfigError: if Llama cannot represent this model, with the reasons, or if :func:`read` raises.
    """
    saved = read(folder)
    scheme = saved.scheme(scheme)
    with reporting_load_errors(folder):  # arguments of another type than the model needs
        values = _llama_config(saved)
        weights = _llama_weights(saved, values)
    model = huggingface.build(values, weights, folder)
    max_length = values["max_position_embeddings"]
    stock = Opened(model, MEGATRON, PRE_LN, folder, huggingface.settings(model), max_length=max_length)
    stock.dtype = widest(entry.properties.dtype for entry in saved.tensors.values())
    return huggingface.with_scheme(stock, scheme)


def _llama_config(saved: Saved) -> dict[str, Any]:
    """Return the settings of the Llama config."""
    args = saved.args
    values = {name: getattr(args, name) for name in _LLAMA_VALUES if hasattr(args, name)}
    unsupported = [f"{name}={value!r}" for name, value in values.items() if value not in _LLAMA_VALUES[name]]
    if unsupported:
        raise LNSConfigError(f"{saved.folder}: stock Llama cannot represent this model: {', '.join(unsupported)}.")
    heads = int(args.num_attention_heads)
    groups = getattr(args, "num_query_groups", None) if getattr(args, "group_query_attention", True) else None
    return {
        "model_type": "llama",
        "vocab_size": saved.tensors["embedding.word_embeddings.weight"].size[0],  # padding included
        "hidden_size": int(args.hidden_size),
        "intermediate_size": int(args.ffn_hidden_size),
        "num_hidden_layers": int(args.num_layers),
        "num_attention_heads": heads,
        "num_key_value_heads": int(groups) if groups else heads,
        "head_dim": int(getattr(args, "kv_channels", None) or args.hidden_size // heads),
        "max_position_embeddings": int(args.max_position_embeddings),
        "rope_theta": float(getattr(args, "rotary_base", 10_000)),
        "rms_norm_eps": float(saved.argument("norm_epsilon", "layernorm_epsilon")),
        "initializer_range": float(getattr(args, "init_method_std", 0.02)),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", False),
        "attention_bias": False,
        "mlp_bias": False,
        # Megatron's arguments do not name the special tokens; the tokenizer does.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


#: Megatron's names -> Llama's. ``linear_qkv.weight`` and ``linear_fc1.weight`` are split.
_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "decoder.layers": "model.layers",
    "output_layer": "lm_head",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.linear_qkv": "self_attn.{}_proj",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1": "mlp.{}_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


def _llama_weights(saved: Saved, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the unfolded weights under Llama's names. A weight that Llama does not have keeps Megatron's name."""
    state: dict[str, torch.Tensor] = {}
    for megatron_name, tensor in saved.weights().items():
        is_stacked = megatron_name.startswith("decoder.layers.") and not megatron_name.split(".")[2].isdigit()
        for layer, weight in enumerate(tensor if is_stacked else [tensor]):
            numbered = f"decoder.layers.{layer}." if is_stacked else "decoder.layers."
            name = huggingface.renamed(megatron_name.replace("decoder.layers.", numbered), _NAMES)
            if megatron_name.endswith(("layer_norm_weight", "layernorm.weight")):
                # The gain of a Llama is 1 plus a zero-centered one. fp32 holds the sum, so it is rounded only once, at
                # the end of the export.
                state[name] = weight.float() + saved.shift if saved.shift else weight
            elif megatron_name.endswith("linear_qkv.weight"):
                state |= {name.format(x): rows for x, rows in zip("qkv", _split_qkv(weight, config), strict=True)}
            elif megatron_name.endswith("linear_fc1.weight"):
                state |= {name.format(x): rows for x, rows in zip(("gate", "up"), weight.chunk(2), strict=True)}
            else:
                state[name] = weight
    return state


def _split_qkv(weight: torch.Tensor, config: dict[str, Any]) -> list[torch.Tensor]:
    """Split the rows of ``linear_qkv``, which are grouped by key head, into query, key and value."""
    groups, hidden_size = config["num_key_value_heads"], weight.shape[-1]
    heads_per_group = config["num_attention_heads"] // groups + 2
    grouped = weight.view(groups, heads_per_group, config["head_dim"], hidden_size)
    return [part.reshape(-1, hidden_size) for part in (grouped[:, :-2], grouped[:, -2], grouped[:, -1])]
