"""OLMo checkpoints, unsharded and sharded: what their config says of a model, and the files opened and checked."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping

import yaml

from olmo_lns.checkpoints import open_distributed
from olmo_lns.checkpoints.tensors import LazyTensor, check_shapes, read_state
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.integrations.olmo import types
from olmo_lns.record import RECORD_FILE, Record
from olmo_lns.schemes import SUB_LAYERS, Scheme

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint


#: Folder of a sharded (``torch_new``) checkpoint.
SHARDED = "model_and_optim"
#: Settings that count something: none of a model is 0.
_COUNTS = (
    *("d_model", "n_heads", "n_kv_heads", "n_layers", "mlp_ratio", "mlp_hidden_size", "max_sequence_length"),
    *("vocab_size", "embedding_size", "block_group_size"),
)


#: Settings that change nothing in what a trained model computes: dropout, initialization, kernels, devices.
IGNORED = {
    *("flash_attention", "attention_dropout", "residual_dropout", "embedding_dropout", "init_device", "precision"),
    *("init_cutoff_factor", "scale_emb_init", "emb_init_std"),
}


@dataclass(frozen=True)
class Architecture:
    """OLMo's ``ModelConfig``: its fields and defaults, read without importing OLMo.

    Settings that do not change what a trained model computes (:data:`IGNORED`) are passed over; an unknown one is
    refused, because nobody can say what it would do.
    """

    d_model: int = 768
    n_heads: int = 12
    n_kv_heads: int | None = None
    clip_qkv: float | None = None
    n_layers: int = 12
    mlp_ratio: int = 4
    mlp_hidden_size: int | None = None
    activation_type: str = "swiglu"
    block_type: str = "sequential"
    block_group_size: int = 1
    alibi: bool = False
    alibi_bias_max: float = 8.0
    rope: bool = False
    rope_full_precision: bool = True
    rope_theta: float = 10_000
    multi_query_attention: bool | None = None
    attention_layer_norm: bool = False
    embedding_layer_norm: bool = False
    layer_norm_type: str = "default"
    layer_norm_with_affine: bool = True
    layer_norm_eps: float = 1e-05
    attention_layer_norm_with_affine: bool = True
    max_sequence_length: int = 1024
    include_bias: bool = True
    bias_for_layer_norm: bool | None = None
    scale_logits: bool = False
    vocab_size: int = 50257
    embedding_size: int | None = 50304
    weight_tying: bool = True
    eos_token_id: int = 50256
    pad_token_id: int = 50256
    init_fn: str = "normal"
    init_std: float = 0.02
    norm_after: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: object) -> Architecture:
        """From the ``model`` section of a config.yaml.

        :raises LNSConfigError: an unknown field, or a value that is not of its field's kind or no model's.
        """
        kinds = {f.name: str(f.type) for f in fields(cls)}
        if unknown := sorted(str(name) for name in set(config) - set(kinds) - IGNORED):
            raise LNSConfigError(f"{source}: unknown model setting {unknown[0]!r}: this export cannot tell its effect")
        values = {name: _converted(name, value, kinds[name], source) for name, value in config.items() if name in kinds}
        return cls(**values).checked(source)

    def checked(self, source: object) -> Architecture:
        """:raises LNSConfigError: a size that no model has."""
        for name in _COUNTS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise LNSConfigError(f"{source}: {name} must be at least 1, found {value}")
        if self.d_model % self.n_heads or self.n_heads % self.kv_heads:
            raise LNSConfigError(
                f"{source}: d_model {self.d_model}, {self.n_heads} heads and {self.kv_heads} key-value heads: expected "
                "each to be a multiple of the next"
            )
        return self

    @property
    def lns(self) -> bool:
        return types.has_scheme(self.layer_norm_type)

    @property
    def base_norm(self) -> str:
        return types.base_type(self.layer_norm_type)

    @property
    def norm_bias(self) -> bool:
        chosen = self.include_bias if self.bias_for_layer_norm is None else self.bias_for_layer_norm
        return bool(self.layer_norm_with_affine and chosen)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        if self.n_kv_heads is not None:
            return self.n_kv_heads
        return 1 if self.multi_query_attention else self.n_heads

    @property
    def ff_inner(self) -> int:
        """Rows of ``ff_proj``: up and gate together for SwiGLU."""
        return self.mlp_hidden_size if self.mlp_hidden_size is not None else self.mlp_ratio * self.d_model

    @property
    def ff_out_inner(self) -> int:
        return self.ff_inner // 2 if self.activation_type == "swiglu" else self.ff_inner

    @property
    def embeddings(self) -> int:
        return self.embedding_size or self.vocab_size

    def sites(self, index: int, sub_layer: str) -> list[str]:
        """Parameters of a sub-layer of block ``index`` (0-based) into which the factor of its norm is folded.

        Gain and bias of the norm; where it has none, the linear layers that read it.
        """
        block = f"transformer.blocks.{index}"
        if self.layer_norm_with_affine:
            return [f"{block}.{sub_layer}_norm.{part}" for part in ("weight", "bias")[: 1 + self.norm_bias]]
        attention = ["att_proj"] if self.block_type == "sequential" else ["q_proj", "k_proj", "v_proj"]
        return [f"{block}.{name}.weight" for name in (attention if sub_layer == "attn" else ["ff_proj"])]

    def check_weights(
        self, found: Mapping[str, LazyTensor], source: object, shapes: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        """:param shapes: gives names and shapes; None: :meth:`shapes`.

        The weights are counted first: a config that says ten million layers would take long to name them.

        :raises LNSConfigError: ``found`` are not the weights of this model.
        """
        if self.n_layers > len(found):
            raise LNSConfigError(
                f"{source}: its config says {self.n_layers} layers, but it holds only {len(found)} weights"
            )
        check_shapes(found, (shapes or self.shapes)(), source)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of the model and its shape, block groups flattened."""
        return dict(self._shapes())

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        d, kv = self.d_model, self.kv_heads * self.head_dim
        yield "transformer.wte.weight", (self.embeddings, d)
        if not (self.rope or self.alibi):
            yield "transformer.wpe.weight", (self.max_sequence_length, d)
        if self.embedding_layer_norm:
            yield from self._norm("transformer.emb_norm", d, self.layer_norm_with_affine)
        for index in range(self.n_layers):
            block = f"transformer.blocks.{index}"
            for sub_layer in SUB_LAYERS:
                yield from self._norm(f"{block}.{sub_layer}_norm", d, self.layer_norm_with_affine)
                plan = types.scheme_of(self.layer_norm_type).plan(index + 1, self.n_layers, sub_layer)
                if plan.norms == 2:
                    yield from self._norm(f"{block}.{sub_layer}_norm_out", d, self.layer_norm_with_affine)
                for name, learned in (("gate", plan.gate), ("omega", plan.omega)):
                    if learned is not None:
                        yield f"{block}.{sub_layer}_{name}.weight", (learned.elements(d),)
            if self.attention_layer_norm:
                yield from self._norm(f"{block}.q_norm", d, self.attention_layer_norm_with_affine)
                yield from self._norm(f"{block}.k_norm", kv, self.attention_layer_norm_with_affine)
            if self.block_type == "sequential":
                yield from self._linear(f"{block}.att_proj", d + 2 * kv, d)
            else:
                for name, rows in (("q_proj", d), ("k_proj", kv), ("v_proj", kv)):
                    yield from self._linear(f"{block}.{name}", rows, d)
            yield from self._linear(f"{block}.attn_out", d, d)
            yield from self._linear(f"{block}.ff_proj", self.ff_inner, d)
            yield from self._linear(f"{block}.ff_out", d, self.ff_out_inner)
        yield from self._norm("transformer.ln_f", d, self.layer_norm_with_affine)
        if not self.weight_tying:
            yield from self._linear("transformer.ff_out", self.embeddings, d)

    def _linear(self, name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        if self.include_bias:
            yield f"{name}.bias", (rows,)

    def _norm(self, name: str, size: int, affine: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        if affine:
            yield f"{name}.weight", (size,)
            if self.include_bias if self.bias_for_layer_norm is None else self.bias_for_layer_norm:
                yield f"{name}.bias", (size,)


def _converted(name: str, value: Any, kind: str, source: object) -> Any:
    """``value`` as the field of type ``kind`` (``int``, ``float | None``, …) holds it.

    :raises LNSConfigError: it is of another type.
    """
    wanted, _, optional = kind.partition(" | ")
    if value is None and optional:
        return None
    if wanted == "float" and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML 1.1 reads 1e-05 as text; OLMo's own loader reads a number
    allowed: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    right = isinstance(value, allowed[wanted]) and isinstance(value, bool) == (wanted == "bool")
    if not right:
        expected = wanted + (" or null" if optional else "")
        raise LNSConfigError(f"{source}: {name} must be of type {expected}, found {value!r:.80}")
    return float(value) if wanted == "float" else value


def section(config: Mapping[str, Any], name: str, source: object) -> Mapping[str, Any]:
    """A section of a config, empty where it is absent. :raises LNSConfigError: it is not a section."""
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise LNSConfigError(f"{source}: {name} must be a section, found {found!r:.80}")
    return found


def identifier_in(config: Mapping[str, Any], source: object) -> str | None:
    """``tokenizer.identifier`` of an OLMo config, or of the dataset of an OLMo-core config; None without one.

    :raises LNSConfigError: it is not a string, or ``tokenizer`` is not a section.
    """
    identifier = section(config, "tokenizer", source).get("identifier")
    if identifier is not None and not isinstance(identifier, str):
        raise LNSConfigError(f"{source}: tokenizer.identifier must be a name or path, found {identifier!r:.80}")
    return identifier


def is_olmo(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def checkpoints_inside(folder: Path) -> list[str]:
    """Names of the checkpoints in the folder of a run, by step."""
    numbered = [(re.match(r"step(\d+)", path.name), path) for path in folder.iterdir()]
    found = [(int(match[1]), path.name) for match, path in numbered if match and is_olmo(path)]
    return [name for _, name in sorted(found)]


@dataclass(frozen=True)
class OLMoCheckpoint:
    """An OLMo checkpoint folder whose config, record and weights agree.

    :param config: the whole config.yaml.
    :param record: how LNS was used; what the config says where the folder has no ``lns.json``.
    :param layout: ``unsharded`` (model.pt) or ``sharded`` (model_and_optim/).
    """

    folder: Path
    config: Mapping[str, Any]
    architecture: Architecture
    record: Record
    layout: str

    @classmethod
    def open(cls, folder: str | Path, *, exponent: float | None = None) -> OLMoCheckpoint:
        """Read and compare config, record and the names and shapes of all weights; load no weight.

        :param exponent: of the factor, for a checkpoint without a record whose config names none.
        :raises LNSConfigError: damaged, incomplete, contradictory, or of a kind that is not supported.
        """
        folder = Path(folder)
        path = folder / "config.yaml"
        config = _read_config(path)
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise LNSConfigError(f"{path} has no section 'model': it is not the config.yaml of an OLMo checkpoint")
        architecture = Architecture.from_config(config["model"], path)
        layout = _layout(folder)  # first: a folder of checkpoints has no record to be missed
        record = _record(folder, architecture, exponent)
        checkpoint = cls(folder, config, architecture, record, layout)
        architecture.check_weights(checkpoint.tensors, folder)
        return checkpoint

    @cached_property
    def sharded(self) -> DistributedCheckpoint:
        return open_distributed(self.folder / SHARDED)

    @cached_property
    def _stored(self) -> dict[str, LazyTensor]:
        if self.layout == "unsharded":
            return read_state(self.folder / "model.pt")
        return {n: self.sharded.tensor(n) for n in self.sharded.names if n.startswith("model.")}

    @cached_property
    def stored_names(self) -> dict[str, str]:
        """Parameter name, block groups flattened -> its name in the file."""
        found = (re.search(r"block_groups\.0\.(\d+)\.", name) for name in self._stored)
        size = 1 + max((int(match[1]) for match in found if match), default=0)
        return {_canonical(name, size): name for name in self._stored}

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """Parameter name, block groups flattened -> the weight."""
        return {name: self._stored[stored] for name, stored in self.stored_names.items()}


def _read_config(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        aliased = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        config = None if aliased else yaml.safe_load(text)
    except OSError as error:
        raise LNSConfigError(f"{path} cannot be read: {one_line(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LNSConfigError(f"{path} is not valid YAML: {one_line(error)}") from None
    if aliased:  # what refers to itself could not even be compared
        raise LNSConfigError(f"{path} holds a YAML alias (*name), which OLMo never writes: write the value out")
    return config


def _canonical(stored: str, group_size: int) -> str:
    name = stored.removeprefix("model.").replace("_fsdp_wrapped_module.", "")

    def flatten(match: re.Match[str]) -> str:
        return f"transformer.blocks.{int(match[1]) * group_size + int(match[2])}."

    return re.sub(r"^transformer\.block_groups\.(\d+)\.(\d+)\.", flatten, name)


def _record(folder: Path, architecture: Architecture, exponent: float | None) -> Record:
    """The record in ``folder``, compared with the config; without one what the config says, as for a resume."""
    named, base = architecture.layer_norm_type, architecture.base_norm
    record, said = Record.read(folder), types.written_record(named, architecture.init_fn)
    written = said.scheme
    if record is None:
        if exponent is not None and "exponent" in written.parameters:
            if types.has_parameters(named) and written.parameters["exponent"] != exponent:
                raise LNSConfigError(f"{folder}: config.yaml names {named}, --exponent says {exponent:g}")
            said = replace(said, scheme=Scheme.of(written.name, exponent=exponent))
        return said
    says = record.scheme.parameters.get("exponent")
    if exponent is not None and record.active and exponent != says:
        raise LNSConfigError(f"{folder}: {RECORD_FILE} says exponent {says}, --exponent says {exponent:g}")
    contradicts = record.active != architecture.lns or (not record.scheme.is_pre_ln and record.norm != base)
    if record.active and not contradicts:
        contradicts = written.name != record.scheme.name or (bool(written.arguments) and written != record.scheme)
    if contradicts:
        raise LNSConfigError(
            f"{folder}: config.yaml names layer_norm_type {named}, {RECORD_FILE} says {record}: they contradict each "
            "other, one of them was changed after the checkpoint was written"
        )
    return record


def _layout(folder: Path) -> str:
    if (folder / "model.pt").is_file():
        return "unsharded"
    if (folder / SHARDED).is_dir():
        return "sharded"
    unshard = "unshard it first with OLMo's scripts/unshard.py (and copy lns.json beside the result)"
    for name, kind in (
        ("rank0.pt", "torch_legacy, whose files need a full unpickling"),
        ("model/rank0.pt", "the local checkpointer (flat FSDP parameters)"),
        ("model", "olmo_core, another format"),
    ):
        if (folder / name).exists():
            raise LNSConfigError(f"{folder} is sharded by {kind}: {unshard}")
    problem = f"{folder} has neither model.pt nor {SHARDED}/"
    if inside := checkpoints_inside(folder):
        raise LNSConfigError(f"{problem}: it is the folder of a run; give one of its checkpoints: {', '.join(inside)}")
    raise LNSConfigError(f"{problem}: it is not a complete OLMo checkpoint")
