"""The plan of a scheme for one sub-layer of one block: where it has norms, and what it multiplies by.

For a sub-layer f (attention or feed-forward) with residual stream x::

    h = f(norm_scale * NormBefore(input_scale * x))
    h = gate * output_scale * NormOnOutput(h)
    x = stream_scale * NormOnSum(alpha * (omega * x) + h)

Each of the three norms has the model's base type, or is absent. The default plan is Pre-LN, with only the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["SUB_LAYERS", "Learned", "Plan"]

#: The two sub-layers of a block, in the order in which a block runs them.
SUB_LAYERS = ("attn", "ff")


@dataclass(frozen=True)
class Learned:
    """A factor that is trained.

    :param per_channel: true for a vector of hidden_size elements, false for one number.
    :param start: initial value.
    """

    per_channel: bool
    start: float

    def elements(self, hidden_size: int) -> int:
        return hidden_size if self.per_channel else 1


@dataclass(frozen=True)
class Plan:
    """The computation of one sub-layer under a scheme.

    The names are those of the equation at the top of this module, and of the papers. Constants are Python floats
    without a unit. The default is stock Pre-LN.

    :param norm_before: true for a norm before the sub-layer, as in Pre-LN.
    :param norm_on_output: true for a norm on the output of the sub-layer, before the addition, as in OLMo 2.
    :param norm_on_sum: true for a norm after the addition, as in Post-LN.
    :param gate: trained factor of the output of the sub-layer, or None.
    :param omega: trained factor of the shortcut, or None.
    :param init_factors: factors on freshly drawn weights, by role: ``qkv``, ``v``, ``o``, ``ff_in``, ``ff_out``.
    :param groups: number of groups of channels. The norm takes its statistics over the hidden_size / groups channels of
        a group, for one token.
    """

    norm_before: bool = True
    norm_on_output: bool = False
    norm_on_sum: bool = False
    input_scale: float = 1.0
    norm_scale: float = 1.0
    output_scale: float = 1.0
    stream_scale: float = 1.0
    alpha: float = 1.0
    gate: Learned | None = None
    omega: Learned | None = None
    init_factors: tuple[tuple[str, float], ...] = ()
    groups: int = 1

    @property
    def norm_count(self) -> int:
        """The number of norms of the sub-layer."""
        return self.norm_before + self.norm_on_output + self.norm_on_sum

    @property
    def only_scales_norms(self) -> bool:
        """True if the plan only multiplies the norm before the sub-layer. The framework's own forward is right then."""
        return replace(self, norm_scale=1.0) == Plan()

    @property
    def folds_into_pre_ln(self) -> bool:
        """True if constants and gates can be multiplied into the weights of an equivalent Pre-LN block.

        False for a factor before a norm or on the stream, because a norm cancels such a factor only up to eps.
        """
        other = (self.norm_on_output, self.norm_on_sum, self.omega is not None, self.groups != 1)
        return self.norm_before and not any(other) and self.alpha == self.input_scale == self.stream_scale == 1.0
