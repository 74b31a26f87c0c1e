"""Sites: scale a norm, measure it, read its scheme back, count and report sites.

A :class:`Site` marks the module that applies the factors of a sub-layer: under LayerNorm Scaling, the norm. The scheme
of a built model is always read from its sites.

A scaled module stays the same object; its class becomes a subclass of its class. Parameters, hooks, state-dict keys and
``isinstance`` checks do not change. An integration derives one class for each norm of known arithmetic (the factor is
folded into gain and bias); :class:`ScaledOutput` is for any other. :func:`scale` measures the first and falls back to
the second if the first does not compute the factor times the framework's output.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Callable, Iterable, Iterator

import torch

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.norm import choose_backend
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Plan, Scheme

log = logging.getLogger("olmo_lns")


@dataclass(frozen=True)
class Site:
    """One sub-layer of one block under a scheme.

    :param layer_number: 1-based, global. :param n_layers: number of blocks of the whole model.
    :param sub_layer: ``attn`` or ``ff``; a norm that both read (parallel blocks) has two sites.
    """

    scheme: Scheme
    layer_number: int
    n_layers: int
    sub_layer: str

    @property
    def plan(self) -> Plan:
        return self.scheme.plan(self.layer_number, self.n_layers, self.sub_layer)

    def __str__(self) -> str:
        return f"block {self.layer_number}, {self.sub_layer}"


def attach(module: Any, *new_sites: Site) -> None:
    """Store on ``module`` the sites whose plans the module computes.

    :raises LNSConfigError: the module has a scheme already.
    """
    if present_sites := _sites_of(module):
        raise LNSConfigError(
            f"{type(module).__name__} of {present_sites[0]} has scheme {present_sites[0].scheme} already: a block gets "
            "its scheme once, when it is built."
        )
    module.lns_sites = new_sites


def _sites_of(module: Any) -> tuple[Site, ...]:
    # From the instance: FSDP's and torch.compile's wrappers forward attribute access to the wrapped module.
    return tuple(module.__dict__.get("lns_sites", ()))


def sites(model: Any) -> Iterator[tuple[str, Any, Site]]:
    """Yield ``(module name, module, site)`` for each site in ``model``, in the model's order."""
    for name, module in model.named_modules():
        for site in _sites_of(module):
            yield name, module, site


def read_back(model: Any) -> Scheme:
    """Return the scheme of the built model; Pre-LN if it has no site.

    :raises MeasurementError: two schemes in one model, or a module that does not compute its plan.
    """
    model_sites = list(sites(model))
    if not model_sites:
        return PRE_LN
    schemes = {site.scheme for _, _, site in model_sites}
    if len(schemes) > 1:
        raise MeasurementError(f"found the schemes {', '.join(sorted(map(str, schemes)))} in one model, expected one.")
    for name, module, site in model_sites:
        computed = module.lns_plan(site.sub_layer) if hasattr(module, "lns_plan") else Plan()
        if computed != site.plan:
            differing = (f.name for f in fields(Plan) if getattr(computed, f.name) != getattr(site.plan, f.name))
            found_instead = (f"{n}={getattr(computed, n)!r}, expected {getattr(site.plan, n)!r}" for n in differing)
            raise MeasurementError(
                f"{name} ({site}): found {'; '.join(found_instead)} under {site.scheme}. The module or "
                "its forward was replaced after the block was built; apply the scheme after the replacement."
            )
    return model_sites[0][2].scheme


def check(model: Any, scheme: Scheme, n_layers: int, *, layer_numbers: Iterable[int] | None = None) -> None:
    """Check that every sub-layer of every block has one site under ``scheme``, and that there are no other sites.

    :param layer_numbers: numbers of the blocks in ``model``; default 1 … n_layers.
    :raises MeasurementError: the found and the expected sub-layers.
    """
    numbers = range(1, n_layers + 1) if layer_numbers is None else layer_numbers
    expected = [(number, sub_layer) for number in numbers for sub_layer in SUB_LAYERS if not scheme.is_pre_ln]
    actual = [(site.layer_number, site.sub_layer) for _, _, site in sites(model)]
    if sorted(actual) != sorted(expected) or read_back(model) != scheme:
        raise MeasurementError(
            f"{scheme.definition.title} was selected ({scheme}): found {read_back(model)} on {len(actual)} sub-layers "
            f"{actual}, expected {expected}. This framework builds its blocks in an unknown way: report this error, or "
            "run without a scheme."
        )


class Derived:
    """Mixin that makes a class of :func:`derived` picklable."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, stock = type(self).__dict__.get("lns_made_of", (None, None))
        if mixin is None:
            return super().__reduce_ex__(protocol)
        return _new, (mixin, stock), self.__getstate__() if hasattr(self, "__getstate__") else vars(self)


class Scaled(Derived):
    """Mixin for a framework's class: a module with a factor."""

    # A plain float: a buffer would be lost on the meta device; None would be a branch in ``forward``, with one
    # torch.compile graph per layer.
    lns_scale: float
    lns_scale_tensor: torch.Tensor
    lns_backend: Any
    #: The plan of the sub-layer without this module's factor, and the factor's name in the plan.
    lns_form: Plan = Plan()
    lns_field: str = "norm_scale"
    #: True if the mixin's forward calls the framework's, so that a wrapper around that one keeps running.
    lns_calls_forward = False
    #: Text for the start-up line: the way in which the factor is applied. The default is the norm's backend.
    lns_way = ""

    def lns_plan(self, sub_layer: str) -> Plan:
        """Return the plan that ``forward`` computes, without the factor if the instance's forward was replaced."""
        replaced = vars(self).get("forward")
        # accelerate's hooks keep the old forward; a ScaledForward applies the factor
        if replaced is not None and not isinstance(replaced, ScaledForward) and "_old_forward" not in vars(self):
            return self.lns_form
        factor: dict[str, Any] = {self.lns_field: self.lns_scale}
        return replace(self.lns_form, **factor)

    @property
    def lns_factor(self) -> Any:
        """The factor as a float, or for torch.compile an equal 0-d CPU tensor: one graph for all blocks.

        Dynamo treats the first block's float as a constant and the second block's as an input. Recomputation of a
        checkpointed first block then runs the other graph, which saves other tensors: torch raises a CheckpointError.
        A tensor is an input from the start. State dicts, meta device and FSDP do not see it.
        """
        return self.lns_scale_tensor if torch.compiler.is_compiling() else self.lns_scale

    def extra_repr(self) -> str:
        base = super().extra_repr()  # type: ignore[misc]
        return f"{base}{', ' if base else ''}lns_scale={self.lns_scale:.6g}"


class ScaledOutput(Scaled):
    """Any module: its output, or the first of its outputs, times the factor."""

    lns_way = "outputs multiplied"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _times(super().forward(*args, **kwargs), self.lns_factor)  # type: ignore[misc]


class ScaledForward:
    """The forward of a module instance, times the module's factor."""

    def __init__(self, module: Any, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _times(self.forward(*args, **kwargs), self.module.lns_factor)


def _times(output: Any, factor: Any) -> Any:
    return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor


_derived: dict[tuple[type, type], Any] = {}


def derived(mixin: type, stock: type) -> Any:
    """Return the picklable subclass of ``mixin`` and ``stock``, the same for each call."""
    if (mixin, stock) not in _derived:
        members = {"lns_made_of": (mixin, stock), "__module__": stock.__module__, "__doc__": stock.__doc__}
        # Under the stock class's name, which Megatron-FSDP and quantization recipes read.
        _derived[mixin, stock] = type(stock.__name__, (mixin, stock), members)
    return _derived[mixin, stock]


def _new(mixin: type, stock: type) -> Any:
    kind = derived(mixin, stock)
    return kind.__new__(kind)


def set_kind(
    module: Any, kind: type, scale: float, *, form: Plan = Scaled.lns_form, field: str = Scaled.lns_field
) -> None:
    """Change the class of ``module`` to ``kind``, a subclass of :class:`Scaled` and of its class; set the factor."""
    module.__class__ = kind
    module.lns_scale, module.lns_form, module.lns_field = scale, form, field
    module.lns_scale_tensor = torch.tensor(scale, dtype=torch.float64, device="cpu")
    module.lns_backend = choose_backend()


def scale(
    module: Any,
    factor: float,
    *,
    where: object,
    width: int,
    folded: type | None = None,
    form: Plan = Scaled.lns_form,
    field: str = Scaled.lns_field,
    respond: Callable[[Any], probe.Response] | None = None,
) -> None:
    """Multiply the output of ``module`` by ``factor``, in place, and measure it against the output before.

    :param where: site of the module, for the message. :param width: the hidden size.
    :param folded: mixin with the factor in its arithmetic, for a known class of ``module``. It is used if the module's
        forward is not wrapped and measures ``factor`` times the framework's output; else the output is multiplied.
    :param form: the plan without this factor. :param field: the factor's name in the plan.
    :param respond: measures the module; default :func:`olmo_lns.probe.response`, which expects a norm.
    :raises MeasurementError: neither way gives ``factor`` times the output before. The module is left unchanged.

    Example: ``scale(norm, 0.5, where="block 4, attn", width=4096)``.
    """
    respond = respond or functools.partial(probe.response, width=width)
    stock: Any = type(module)
    try:
        stock_response, problem = respond(module), ""
    except Exception as error:
        raise MeasurementError(
            f"{where} ({stock.__name__}): found a module that does not take rows of {width} channels "
            f"({type(error).__name__}: {error}); expected a norm of the stream."
        ) from error
    calls_forward = getattr(folded, "lns_calls_forward", False)
    plain = "forward" not in vars(module) and (calls_forward or (is_plain(stock) and _has_same_arity(stock, folded)))
    for mixin in [*([folded] if folded is not None and plain else []), ScaledOutput]:
        set_kind(module, derived(mixin, stock), factor, form=form, field=field)
        replaced = vars(module).get("forward")
        if replaced is not None:
            module.forward = ScaledForward(module, replaced)
        try:
            problem = respond(module).problem(stock_response, factor)
        except Exception as error:  # the folded arithmetic reads an attribute that this norm lacks
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return
        _restore_class(module, stock, replaced)
    raise MeasurementError(
        f"{where} ({stock.__name__}): measured {problem}. This module bypasses its forward; expected a norm whose "
        "output can be scaled."
    )


def _restore_class(module: Any, stock: type, forward: Any) -> None:
    module.__class__ = stock
    for name in [name for name in vars(module) if name.startswith("lns_") and name != "lns_sites"]:
        delattr(module, name)
    if forward is not None:
        module.forward = forward


def _has_same_arity(stock: Any, folded: Any) -> bool:
    """Return true if a folded forward has as many arguments as the framework's own."""
    counts = {len(inspect.signature(kind.forward).parameters) for kind in (stock, folded) if kind is not None}
    return len(counts) == 1


def is_plain(stock: type) -> bool:
    """Return true if the forward of a class is the one of its source file, not decorated and not replaced."""
    forward = inspect.getattr_static(stock, "forward", None)
    owner = next((base for base in stock.__mro__ if "forward" in vars(base)), stock)
    code = getattr(forward, "__code__", None)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return (
        code is not None
        and code.co_name == "forward"
        and not hasattr(forward, "__wrapped__")
        and code.co_filename == file
    )


def restore(model: Any) -> None:
    """Remove the scheme from a model, after a failed attempt or a fold: its modules get their stock classes back."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if "lns_scale" in vars(module):
            made_of = type(module).__dict__.get("lns_made_of")
            stock = (
                made_of[1]
                if made_of
                else next(base for base in type(module).__mro__[1:] if not issubclass(base, Scaled))
            )
            _restore_class(module, stock, forward.forward if isinstance(forward, ScaledForward) else forward)
        vars(module).pop("lns_sites", None)


@contextlib.contextmanager
def stock_on_failure(model: Any) -> Iterator[None]:
    """Restore the classes of a stock model if a scheme cannot be attached or measured, or on an interruption."""
    was_stock = next(sites(model), None) is None
    try:
        yield
    except BaseException:
        if was_stock:
            restore(model)
        raise


# --- the start-up line ----------------------------------------------------------------------------------------------


def start_up_line(
    model: Any, n_layers: int, *, measured: Iterable[str], norm: str = "", local: str = "", initialization: str = ""
) -> str:
    """Return the start-up line, from the scheme that is read back and the measurements.

    :param measured: measured parts: ``("output", "gradient", "initialization")``. :param norm: the base norm.
    :param local: the part of the model in this process, if it is not the whole model.
    :param initialization: text for the initialization: ``"scaled initialization off"``.

    Example: ``LayerNorm Scaling on: 64 norms; s = 1 (block 1) to 0.1768 (block 32); measured: output, gradient``.
    """
    scheme = read_back(model)
    norms = scheme.norm_count(n_layers)
    if scheme.keeps_forward(n_layers) and not local:
        norms = len({module for _, module, _ in sites(model)})  # parallel blocks may share one norm
    count = f"{norms} norms" + (f" ({norm})" if norm else "") + (f", {local}" if local else "")
    ways = dict.fromkeys(_application(module) for _, module, _ in sites(model) if isinstance(module, Scaled))
    parameters = ", ".join(f"{key} {value:g}" for key, value in scheme.values)
    parts = [count, *describe_factors(scheme, n_layers), parameters, *ways, initialization]
    parts.append(f"measured: {', '.join(measured)}")
    return f"{scheme.definition.title} on: {'; '.join(part for part in parts if part)}"


def write_line(line: str) -> None:
    """Write the start-up line: to the log if a handler is set up and INFO is enabled, else to stderr in rank 0."""
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info("%s", line)
    elif os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _application(module: Any) -> str:
    if module.lns_way:
        return str(module.lns_way)
    return f"backend {module.lns_backend.name} ({module.lns_backend.reason})"


def describe_factors(scheme: Scheme, n_layers: int) -> list[str]:
    """Describe constants other than 1, learned factors, Post-LN blocks: ``["s = 1 (block 1) to 0.25 (block 16)"]``."""
    plans = {(number, sub_layer): plan for number, sub_layer, plan in scheme.plans(n_layers)}
    descriptions = []
    for field in fields(Plan):
        values = [getattr(plan, field.name) for plan in plans.values()]
        if isinstance(field.default, float) and any(value != 1.0 for value in values):
            name = "s" if field.name == "norm_scale" else field.name
            # Some schemes scale attention or feed-forward alone.
            by_sub_layer = [(sub_layer, value) for (_, sub_layer), value in zip(plans, values, strict=True)]
            scaled = {sub_layer for sub_layer, value in by_sub_layer if value != 1.0}
            factors = [value for sub_layer, value in by_sub_layer if sub_layer in scaled]
            only = "" if len(scaled) == len(SUB_LAYERS) else f", {', '.join(scaled)} only"
            descriptions.append(f"{name} = {factors[0]:.4g} (block 1) to {factors[-1]:.4g} (block {n_layers}){only}")
        if field.name in ("gate", "omega") and values[0] is not None:
            descriptions.append(f"learned {field.name} from {values[0].start:.4g} to {values[-1].start:.4g}")
    post = sorted({number for (number, _), plan in plans.items() if plan.post})
    if post:
        descriptions.append(f"norm after the addition in blocks {post[0]} to {post[-1]}")
    return descriptions
