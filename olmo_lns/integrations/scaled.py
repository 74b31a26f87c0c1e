"""A module of the framework's that carries a factor: a norm, or the branch after it.

It keeps its identity and becomes an instance of a subclass of its own class: parameters, their
attributes, hooks, state-dict keys and ``isinstance`` checks stay as the framework made them. An integration
derives one class for each norm whose arithmetic it knows; :class:`ScaledOutput` is for any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from olmo_lns.norm import choose_backend
from olmo_lns.schemes import Plan

__all__ = ["Scaled", "ScaledOutput", "give"]


class Scaled:
    """Mixin, in front of the framework's class: what every scaled module has."""

    # A plain float: a buffer would be lost on the meta device, and a None would be a branch in
    # ``forward`` for which torch.compile builds one graph per layer.
    lns_scale: float
    lns_scale_tensor: torch.Tensor
    lns_backend: Any
    #: The plan of the sub-layer without this module's factor, and that factor's name in it.
    lns_form: Plan = Plan()
    lns_field: str = "norm_scale"

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that ``forward`` computes."""
        factor: dict[str, Any] = {self.lns_field: self.lns_scale}
        return replace(self.lns_form, **factor)

    @property
    def lns_factor(self) -> Any:
        """The factor as a float, or for torch.compile an equal 0-d CPU tensor: one graph for all blocks.

        Dynamo burns the first block's float into its graph and makes the second block's an input. The recomputation
        of a checkpointed first block then runs the other graph, which saves other tensors, and torch stops with a
        CheckpointError. A tensor is an input from the start. It is no buffer: state dicts, meta device and FSDP do not
        know it.
        """
        return self.lns_scale_tensor if torch.compiler.is_compiling() else self.lns_scale

    def extra_repr(self) -> str:
        base = super().extra_repr()  # type: ignore[misc]
        return f"{base}{', ' if base else ''}lns_scale={self.lns_scale:.6g}"


class ScaledOutput(Scaled):
    """Any module: its output, or the first of its outputs, times the factor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        if isinstance(out, tuple):
            return (out[0] * self.lns_factor, *out[1:])
        return out * self.lns_factor


def give(module: Any, kind: type, scale: float, *, form: Plan = Scaled.lns_form, field: str = Scaled.lns_field) -> None:
    """Make ``module`` a ``kind``, a subclass of :class:`Scaled` and of its own class, with this factor."""
    module.__class__ = kind
    module.lns_scale, module.lns_form, module.lns_field = scale, form, field
    module.lns_scale_tensor = torch.tensor(scale, dtype=torch.float64, device="cpu")
    module.lns_backend = choose_backend()
