"""LayerNorm Scaling in OLMo-core: a block config that ``_CLASS_`` names, and :func:`apply`.

``--model.block._CLASS_=olmo_lns.olmo_core.BlockConfig --model.block.scheme=lns`` selects LNS in an unmodified launch.
Configs save the name of the class, so its module and name never change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Optional, TypeVar

import olmo_core.nn.transformer.config as _upstream

from olmo_lns.environment import DISABLE, is_set
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.hook import require_wrapped
from olmo_lns.integrations.olmo_core import blocks, register
from olmo_lns.integrations.olmo_core.checkpoint import scheme_of
from olmo_lns.schemes import Scheme

__all__ = ["BlockConfig", "apply"]

if not is_set(DISABLE):
    register()  # if the start-up hook did not

C = TypeVar("C")


@dataclass
class BlockConfig(_upstream.TransformerBlockConfig):
    """OLMo-core's block config with a scheme. All other fields are those of OLMo-core.

    :param scheme: ``lns`` for blocks ``default``, ``moe`` and ``moe_hybrid``. ``reordered_norm`` blocks support
        ``branchln``, which has no factor, and ``branchln_depth``. The latter is *not* the paper's method: its factor is
        on a norm after the sub-layer.
    :param exponent: exponent p of the factor l ** -p of block l, counted from 1. None means 0.5, as in the paper.
    :param initialization: ``plain`` or None refuses an ``init_method`` with a depth factor, and ``upstream`` keeps it.
    :raises LNSConfigError: if a value is not allowed, or the scheme does not support the type of the block.

    Source of ``lns``: arXiv 2502.05795.

    Example: ``config.merge(["--block._CLASS_=olmo_lns.olmo_core.BlockConfig", "--block.scheme=lns"])``.
    """

    # No `str | None`: OLMo-core reads these annotations when it decodes a config.
    scheme: str = "lns"
    exponent: Optional[float] = None  # noqa: UP045
    initialization: Optional[str] = None  # noqa: UP045

    def __post_init__(self, attention: Any = None) -> None:  # noqa: RUF033  the parent's InitVar
        if hasattr(_upstream.TransformerBlockConfig, "__post_init__"):  # from 2.5.0 on
            super().__post_init__(attention)
        scheme = scheme_of(self.scheme, exponent=self.exponent)
        # A saved config spells every field, defaults included.
        self.scheme, self.exponent = scheme.name, scheme.parameters.get("exponent")
        if self.initialization not in (None, "plain", "upstream"):
            raise LNSConfigError(
                f"block.initialization is {self.initialization!r}. Expected plain or upstream. OLMo-core's init_method "
                "draws the weights."
            )
        self.initialization = self.initialization or "plain"

    @property
    def resolved_scheme(self) -> Scheme:
        """The scheme of these fields."""
        return scheme_of(self.scheme, exponent=self.exponent)

    def build(self, *, d_model: int, block_idx: int, n_layers: int, init_device: str = "cpu", cache: Any = None) -> Any:
        """Build OLMo-core's block and attach the scheme. :param block_idx: 0-based, global."""
        if is_set(DISABLE):
            raise LNSConfigError(f"{DISABLE}=1 is set, but a block config names a scheme. Unset it, or remove _CLASS_.")
        require_wrapped("olmo_core")
        blocks.require_supported(self.resolved_scheme, self.name, n_layers)
        block = self.stock().build(
            d_model=d_model, block_idx=block_idx, n_layers=n_layers, init_device=init_device, cache=cache
        )
        blocks.attach_to_block(block, self, d_model=d_model, block_idx=block_idx, n_layers=n_layers)
        return block

    def stock(self) -> _upstream.TransformerBlockConfig:
        """Return the same block config without a scheme."""
        names = [field.name for field in dataclasses.fields(_upstream.TransformerBlockConfig)]
        return _upstream.TransformerBlockConfig(**{name: getattr(self, name) for name in names})


def apply(config: C, scheme: str = "lns", **fields: Any) -> C:
    """Select ``scheme`` for every block of a config, in place: block, named blocks and block overrides.

    :param config: a ``TransformerConfig``, or an object with one in ``model``.
    :param fields: other fields of :class:`BlockConfig`, such as ``exponent=0.25``.
    :returns: ``config``.
    :raises LNSConfigError: if ``config`` is something else, if a block config has another class than
        ``TransformerBlockConfig`` or has a scheme already, or if the scheme does not support the type of a block.

    Example: ``apply(TransformerConfig.llama2_271M(vocab_size=50304), "lns", exponent=0.5)``, then ``config.build()``.
    """
    model: Any = getattr(config, "model", config)
    if not hasattr(model, "block") or not hasattr(model, "n_layers"):
        raise LNSConfigError(
            f"apply() found an object of the type {type(config).__name__}. It needs OLMo-core's "
            "TransformerConfig, or a config with one in `model`."
        )

    def with_scheme(block: Any) -> BlockConfig:
        if type(block) is not _upstream.TransformerBlockConfig:
            raise LNSConfigError(
                f"apply() found a block config of class {type(block).__name__}. Pass a config of stock blocks."
            )
        values = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        block_config = BlockConfig(**values, scheme=scheme, **fields)
        blocks.require_supported(block_config.resolved_scheme, block_config.name, model.n_layers)
        return block_config

    def with_schemes(blocks: Any) -> Any:
        return {key: with_scheme(block) for key, block in blocks.items()} if isinstance(blocks, dict) else blocks

    block = with_schemes(model.block) if isinstance(model.block, dict) else with_scheme(model.block)
    model.block, model.block_overrides = block, with_schemes(model.block_overrides)
    return config


def __getattr__(name: str) -> Any:
    # OLMo-core treats an AttributeError as "no such class" and silently builds its own block.
    if name.startswith("_"):
        raise AttributeError(name)
    raise LNSConfigError(
        f"olmo_lns.olmo_core has no {name!r}{did_you_mean(name, __all__)}. The block config is "
        "olmo_lns.olmo_core.BlockConfig."
    )
