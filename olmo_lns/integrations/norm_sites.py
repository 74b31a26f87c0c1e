"""What every integration does the same way: scale a norm, attach a site to it, count the sites, read them back, say so.

The module that carries out the plan of a sub-layer (in LayerNorm Scaling its norm) has a :class:`Site`. Guards, records
and the start-up line read the sites of the built model, and only compare them with what was asked for.

A module with a factor stays the same object and becomes an instance of a subclass of its own class: parameters, hooks,
state-dict keys and ``isinstance`` checks stay as the framework made them. An integration derives one class for each
norm whose arithmetic it knows; :class:`ScaledOutput` is for any other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Iterable, Iterator

import torch

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.norm import choose_backend
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Plan, Scheme


@dataclass(frozen=True)
class Site:
    """One sub-layer of one block under a scheme.

    :param layer_number: 1-based, global. :param n_layers: of the whole model. :param sub_layer: ``attn`` or ``ff``.
    """

    scheme: Scheme
    layer_number: int
    n_layers: int
    sub_layer: str

    @property
    def plan(self) -> Plan:
        return self.scheme.plan(self.layer_number, self.n_layers, self.sub_layer)


def attach(module: Any, *found: Site) -> None:
    """Note on ``module`` the sites whose plans it carries out.

    :raises LNSConfigError: it has a scheme already.
    """
    if present := _own(module):
        raise LNSConfigError(
            f"{type(module).__name__} of block {present[0].layer_number} has scheme {present[0].scheme} already: "
            "a block gets its scheme once, when it is built."
        )
    module.lns_sites = found


def _own(module: Any) -> tuple[Site, ...]:
    # Its own: FSDP's and torch.compile's wrappers answer for what they wrap.
    return tuple(module.__dict__.get("lns_sites", ()))


def sites(model: Any) -> Iterator[tuple[str, Any, Site]]:
    """``(module name, module, site)`` of each module in ``model`` that has one, in the model's order."""
    for name, module in model.named_modules():
        for site in _own(module):
            yield name, module, site


def read_back(model: Any) -> Scheme:
    """The scheme that the built model has; Pre-LN where it has no site.

    :raises UpstreamChangedError: two schemes in one model, or a module that computes something else than its plan.
    """
    found = list(sites(model))
    if not found:
        return PRE_LN
    schemes = {site.scheme for _, _, site in found}
    if len(schemes) > 1:
        raise UpstreamChangedError(f"one model with the schemes {', '.join(sorted(map(str, schemes)))}: expected one.")
    for name, module, site in found:
        computed = module.lns_plan(site.sub_layer) if hasattr(module, "lns_plan") else Plan()
        if computed != site.plan:
            differing = (f.name for f in fields(Plan) if getattr(computed, f.name) != getattr(site.plan, f.name))
            found_instead = (f"{n}={getattr(computed, n)!r} instead of {getattr(site.plan, n)!r}" for n in differing)
            raise UpstreamChangedError(
                f"{name} (block {site.layer_number}, {site.sub_layer}) has {', '.join(found_instead)}, as "
                f"{site.scheme} would not have it: something has replaced a module since the block was built."
            )
    return found[0][2].scheme


def check(model: Any, scheme: Scheme, n_layers: int, *, layer_numbers: Iterable[int] | None = None) -> None:
    """Every sub-layer of every block is there exactly once, as ``scheme`` wants it, and nothing else is.

    :param layer_numbers: of the blocks that this process holds; default all.
    :raises UpstreamChangedError: what was found and what was expected.
    :raises LNSConfigError: a setting of the environment that nothing reads, while a scheme runs.
    """
    if not scheme.is_pre_ln:
        environment.check()
    numbers = range(1, n_layers + 1) if layer_numbers is None else layer_numbers
    expected = [(number, sub_layer) for number in numbers for sub_layer in SUB_LAYERS if not scheme.is_pre_ln]
    found = [(site.layer_number, site.sub_layer) for _, _, site in sites(model)]
    if sorted(found) != sorted(expected) or read_back(model) != scheme:
        raise UpstreamChangedError(
            f"{scheme.definition.title} was asked for ({scheme}), but {read_back(model)} is on {len(found)} sub-layers "
            f"{found}, expected the {len(expected)} sub-layers of {len(expected) // 2} blocks: this framework builds "
            "its blocks in a way that was not verified."
        )


def check_places(blocks: Iterable[tuple[int, Any]]) -> None:
    """:raises UpstreamChangedError: a block's number (from 1) is not the one that it was built with."""
    for number, block in blocks:
        if wrong := {site.layer_number for _, _, site in sites(block)} - {number}:
            raise UpstreamChangedError(
                f"block {number} was built as block {wrong.pop()}, with its factor: leave blocks where they were built."
            )


def start_up_line(
    scheme: Scheme, n_layers: int, *, norm: str = "", here: str = "", how: str, initialization: str
) -> str:
    """The line that proves that a scheme is on, from what was read back.

    :param norm: the base norm. :param here: the part of the model that this process holds, where that is not all of it.
    """
    count = f"{scheme.sites(n_layers)} norms" + (f" ({norm})" if norm else "") + (f", {here}" if here else "")
    parameters = ", ".join(f"{key} {value:g}" for key, value in scheme.values)
    parts = [count, *factors_in_words(scheme, n_layers), parameters, how, initialization]
    return f"{scheme.definition.title} on: {'; '.join(part for part in parts if part)}"


def factors_in_words(scheme: Scheme, n_layers: int) -> list[str]:
    """``["s = 1 (block 1) to 0.25 (block 16)"]``: constants that are not 1, learned factors, where norms sit."""
    plans = {(number, sub_layer): plan for number, sub_layer, plan in scheme.plans(n_layers)}
    words = []
    for field in fields(Plan):
        values = [getattr(plan, field.name) for plan in plans.values()]
        if isinstance(field.default, float) and any(value != 1.0 for value in values):
            name = "s" if field.name == "norm_scale" else field.name
            # Of the sub-layers that have the constant: some schemes scale attention or feed-forward alone.
            having = {sub_layer for (_, sub_layer), value in zip(plans, values, strict=True) if value != 1.0}
            scaled = [value for (_, sub_layer), value in zip(plans, values, strict=True) if sub_layer in having]
            only = "" if len(having) == len(SUB_LAYERS) else f", {', '.join(having)} only"
            words.append(f"{name} = {scaled[0]:.4g} (block 1) to {scaled[-1]:.4g} (block {n_layers}){only}")
        if field.name in ("gate", "omega") and values[0] is not None:
            words.append(f"learned {field.name} from {values[0].start:.4g} to {values[-1].start:.4g}")
    post = sorted({number for (number, _), plan in plans.items() if plan.post})
    if post:
        words.append(f"norm after the addition in blocks {post[0]} to {post[-1]}")
    return words


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

        Dynamo burns the first block's float into its graph and makes the second block's an input; recomputation of a
        checkpointed first block then runs the other graph, which saves other tensors, and torch raises a
        CheckpointError. A tensor is an input from the start. State dicts, meta device and FSDP do not see it.
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
