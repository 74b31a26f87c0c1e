"""The plan of a scheme for one sub-layer of one block: where it has norms, and what it multiplies by.

For a sub-layer f (attention or feed-forward) with residual stream x::

    h = f(norm_scale * Pre(pre_scale * x))
    h = gate * branch_scale * Branch(h)
    x = stream_scale * Post(alpha * (omega * x) + h)

Pre, Branch and Post are norms of the model's base type, or absent. The default plan is Pre-LN.
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

    :param pre: true for a norm in front of the sub-layer.
    :param branch: true for a norm on the output of the sub-layer, before the addition.
    :param post: true for a norm on the sum.
    :param gate: trained factor of the branch, or None.
    :param omega: trained factor of the shortcut, or None.
    :param init_factors: factors on freshly drawn weights, by role: ``qkv``, ``v``, ``o``, ``ff_in``, ``ff_out``.
    :param groups: number of groups of channels. The norm takes its statistics over the hidden_size / groups channels of
        a group, for one token.
    """

    pre: bool = True
    branch: bool = False
    post: bool = False
    pre_scale: float = 1.0
    norm_scale: float = 1.0
    branch_scale: float = 1.0
    stream_scale: float = 1.0
    alpha: float = 1.0
    gate: Learned | None = None
    omega: Learned | None = None
    init_factors: tuple[tuple[str, float], ...] = ()
    groups: int = 1

    @property
    def norms(self) -> int:
        """The number of norms of the sub-layer."""
        return self.pre + self.branch + self.post

    @property
    def only_scales_norms(self) -> bool:
        """True if only the norm in front is multiplied, so that the framework's forward of the block is right."""
        return replace(self, norm_scale=1.0) == Plan()

    @property
    def folds_into_pre_ln(self) -> bool:
        """True if constants and gates can be multiplied into the weights of an equivalent Pre-LN block.

        False for a factor in front of a norm or on the stream, which a norm cancels only up to eps.
        """
        other = (self.branch, self.post, self.omega is not None, self.groups != 1)
        return self.pre and not any(other) and self.alpha == self.pre_scale == self.stream_scale == 1.0
