"""Read and write Megatron's distributed checkpoints (``torch_dist``), without Megatron's own loader.

In such a checkpoint, the layers are either stacked along a first axis, so that
``decoder.layers.mlp.linear_fc1.weight`` has the shape [L, …], or they are numbered (``decoder.layers.7.mlp…``).
Megatron saves its arguments in ``common.pt``. Since Megatron Core 0.19, they are in an object of the distributed
checkpoint.
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
from typing import Any, Iterator, Mapping

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.checkpoint import reporting_load_errors
from olmo_lns.export.metadata import SafeReader, load_tensors, read_metadata
from olmo_lns.integrations.megatron.flags import MegatronFlags
from olmo_lns.integrations.megatron.module_names import FUSED_NORM, LAYER
from olmo_lns.schemes import LNS, PRE_LN, Scheme

TRACKER, COMMON, COMMON_OBJECT = "latest_checkpointed_iteration.txt", "common.pt", "common_state/shard_0_1"
#: Entries of a checkpoint that are the state of the training and not of the model.
_TRAINING = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b")
#: Parameters of the two norms of a block, in every layer spec that LNS supports.
_BLOCK_NORM = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?:"
    + "|".join(
        f"(?P<{sub_layer}>{'|'.join(map(re.escape, starts))})"
        for sub_layer, names in LAYER.items()
        for starts in [
            (f"{names.norm}.", *(f"{names.module}.{linear}.{FUSED_NORM}" for linear in names.may_contain_norm))
        ]
    )
    + r")(?P<part>weight|bias)$"
)
#: Plain value classes in saved arguments, apart from Megatron's enumerations.
_SAFE_CLASSES = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": pathlib.PosixPath,
    "signal.Signals": signal.Signals,
}


@dataclass(frozen=True)
class NormParameter:
    """A parameter of one of the two norms of a block.

    :param name: its name in the checkpoint.
    :param sub_layer: ``attn`` or ``ff``.
    :param layer_number: number of its layer, from 1. It is None if the tensor stacks the layers.
    :param is_weight: true for the weight of the norm, and false for its bias.
    """

    name: str
    sub_layer: str
    layer_number: int | None
    is_weight: bool


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
        saved = MegatronFlags.of_saved(self.args).scheme
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

    @property
    def n_layers(self) -> int:
        return int(self.args.num_layers)

    def norm_parameters(self) -> Iterator[NormParameter]:
        """Yield the parameters of the norms before attention and MLP in all layers."""
        for match in filter(None, map(_BLOCK_NORM.match, self.tensors)):
            sub_layer = next(name for name in LAYER if match[name] is not None)
            layer_number = None if match["layer"] is None else int(match["layer"]) + 1
            yield NormParameter(match[0], sub_layer, layer_number, match["part"] == "weight")

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
            f"{folder} has no complete torch_dist checkpoint. If it is in another format, load it in Megatron and save "
            "it with --ckpt-format torch_dist."
        )
    with reporting_load_errors(folder):
        metadata = read_metadata(folder).state_dict_metadata
        common = _common(folder)
    entries = {name: entry for name, entry in metadata.items() if not _TRAINING.match(name) and name != COMMON_OBJECT}
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    saved = Saved(folder, common, tensors, [name for name in entries if name not in tensors])
    layers = saved.n_layers
    weights = [parameter for parameter in saved.norm_parameters() if parameter.is_weight]
    norms = sum(saved.tensors[each.name].size[0] if each.layer_number is None else 1 for each in weights)
    unsupported = [name for name in saved.tensors if re.search(r"\b(mtp|mixer|cross_attention)\b", name)]
    if norms != 2 * layers or unsupported:
        raise LNSConfigError(
            f"{folder} cannot be folded, because it is not a plain transformer decoder. It has {norms} block norms in "
            f"{layers} layers, and these unsupported parameters: {', '.join(unsupported[:1]) or 'none'}. Expected "
            f"{2 * layers} norms, attention and MLP or MoE in every layer, and no MTP."
        )
    return saved


def write(saved: Saved, tensors: Mapping[str, torch.Tensor], out: Path) -> None:
    """Write a checkpoint that stock Megatron loads with ``--finetune``.

    The arguments of LayerNorm Scaling and the state of the optimizer are left out.

    :param saved: the checkpoint from which everything else is copied.
    :param tensors: the new tensors of the model, under the names of the checkpoint.
    :param out: folder of the new run.
    """
    target, state = out / saved.folder.name, {**tensors, **_objects(saved.folder, saved.objects)}
    common = {key: value for key, value in saved.common.items() if not _TRAINING.match(key)}
    args = {name: value for name, value in vars(saved.args).items() if name not in vars(MegatronFlags())}
    common["args"] = argparse.Namespace(**args)
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
        raise LNSConfigError(f"{folder} has no arguments. Expected the arguments of the training run.")
    return common
