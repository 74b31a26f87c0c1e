"""What OLMo's ``config.yaml`` says about a model: its weights, their shapes, where a factor is folded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Iterator, Mapping

from olmo_lns.errors import LNSConfigError

__all__ = ["BASE_NORMS", "Architecture"]

#: Our layer-norm types and OLMo's types of the same norm without the factor.
BASE_NORMS = {"lns_rms": "rms", "lns_default": "default", "lns_low_precision": "low_precision", "lns": "rms"}


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

        :raises LNSConfigError: an unknown field, or a value that is not of its field's kind.
        """
        known = {f.name: f.default for f in fields(cls)}
        if unknown := sorted(set(config) - set(known)):
            raise LNSConfigError(f"{source}: unknown model setting {unknown[0]!r}: this export cannot tell its effect")
        values = dict(config)
        for name, value in values.items():
            # YAML 1.1 reads 1e-05 as text; OLMo's own loader reads a number.
            if isinstance(known[name], float) and value is not None:
                try:
                    values[name] = float(value)
                except (TypeError, ValueError):
                    raise LNSConfigError(f"{source}: {name} must be a number, found {value!r}") from None
            elif type(known[name]) in (int, bool) and not isinstance(value, (int, float)):
                raise LNSConfigError(f"{source}: {name} must be of type {type(known[name]).__name__}, found {value!r}")
        return cls(**values)

    @property
    def lns(self) -> bool:
        return self.layer_norm_type in BASE_NORMS

    @property
    def base_norm(self) -> str:
        return BASE_NORMS.get(self.layer_norm_type, self.layer_norm_type)

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

    def projections(self, index: int) -> list[str]:
        """The linear layers that read the two norms of block ``index`` (0-based)."""
        attention = ["att_proj"] if self.block_type == "sequential" else ["q_proj", "k_proj", "v_proj"]
        return [f"transformer.blocks.{index}.{name}" for name in (*attention, "ff_proj")]

    def sites(self, index: int) -> list[str]:
        """Parameters of block ``index`` (0-based) into which its factor is folded."""
        if not self.layer_norm_with_affine:
            return [f"{name}.weight" for name in self.projections(index)]
        parts = ("weight", "bias") if self.norm_bias else ("weight",)
        return [f"transformer.blocks.{index}.{norm}.{part}" for norm in ("attn_norm", "ff_norm") for part in parts]

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
            for norm in ("attn_norm", "ff_norm"):
                yield from self._norm(f"{block}.{norm}", d, self.layer_norm_with_affine)
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
