"""What OLMo's ``config.yaml`` says about a model: its weights, their shapes, where a factor is folded."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from typing import Any, Callable, Iterator, Mapping

from olmo_lns.checkpoints.tensors import LazyTensor, check_shapes
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo import types
from olmo_lns.schemes import SUB_LAYERS

__all__ = ["Architecture"]

#: Settings that count something: none of a model is 0.
_COUNTS = (
    *("d_model", "n_heads", "n_kv_heads", "n_layers", "mlp_ratio", "mlp_hidden_size", "max_sequence_length"),
    *("vocab_size", "embedding_size", "block_group_size"),
)


@dataclass(frozen=True)
class Architecture:
    """OLMo's ``ModelConfig``: its fields and defaults, read without importing OLMo.

    Fields that do not change what a trained model computes (dropout, initialization, device) are
    read and ignored; an unknown field is refused, because nobody can say what it would do.
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
    flash_attention: bool = False
    attention_dropout: float = 0.1
    multi_query_attention: bool | None = None
    attention_layer_norm: bool = False
    residual_dropout: float = 0.1
    embedding_dropout: float = 0.1
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
    init_device: str | None = None
    init_fn: str = "normal"
    init_std: float = 0.02
    init_cutoff_factor: float | None = None
    precision: str | None = None
    scale_emb_init: bool = False
    emb_init_std: float | None = None
    norm_after: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: object) -> Architecture:
        """From the ``model`` section of a config.yaml.

        :raises LNSConfigError: an unknown field, or a value that is not of its field's kind or no model's.
        """
        kinds = {f.name: str(f.type) for f in fields(cls)}
        if unknown := sorted(str(name) for name in set(config) - set(kinds)):
            raise LNSConfigError(f"{source}: unknown model setting {unknown[0]!r}: this export cannot tell its effect")
        values = {name: _converted(name, value, kinds[name], source) for name, value in config.items()}
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

        :raises LNSConfigError: ``found`` are not the weights of this model; they are counted before names are made.
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
