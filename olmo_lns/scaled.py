"""Classes of modules with a factor: multiply the output of a module in place, and measure it.

A scaled module stays the same object; its class becomes a subclass of its class. Parameters, hooks, state-dict keys and
``isinstance`` checks do not change. :class:`ScaledGainNorm` is for a norm of known arithmetic, with the factor in gain
and bias; :class:`ScaledOutput` is for any other. :func:`scale` measures the first and falls back to the second if the
first does not compute the factor times the framework's output.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from dataclasses import replace
from typing import Any, Callable

import torch

from olmo_lns.errors import MeasurementError
from olmo_lns.norm import NormArithmetic, choose_backend, scaled_norm
from olmo_lns.response import Response, first_output, replace_first, response
from olmo_lns.schemes import Plan


class PicklableSubclass:
    """Mixin that makes a class of :func:`picklable_subclass` picklable."""

    def __init_subclass__(cls, **options: Any) -> None:
        # A framework's class may register its subclasses by name. A class of picklable_subclass is no new one.
        if "lns_bases" not in vars(cls):
            super().__init_subclass__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, stock = type(self).__dict__.get("lns_bases", (None, None))
        if mixin is None:
            return super().__reduce_ex__(protocol)
        return _new, (mixin, stock), self.__getstate__() if hasattr(self, "__getstate__") else vars(self)


class Scaled(PicklableSubclass):
    """Mixin for a framework's class: a module with a factor."""

    # A plain float: a buffer would be lost on the meta device; None would be a branch in ``forward``, with one
    # torch.compile graph per layer.
    lns_scale: float
    lns_scale_tensor: torch.Tensor
    lns_backend: Any
    #: The plan of the sub-layer without this module's factor, and the factor's name in the plan.
    lns_plan_without_factor: Plan = Plan()
    lns_factor_name: str = "norm_scale"
    #: True if the mixin's forward calls the framework's, so that a wrapper around that one keeps running.
    lns_calls_forward = False
    #: Text for the start-up line: the way in which the factor is applied. The default is the norm's backend.
    lns_how_applied = ""

    def lns_plan(self, sub_layer: str) -> Plan:
        """Return the plan that ``forward`` computes, without the factor if the instance's forward was replaced."""
        replaced = vars(self).get(_forward_name(self))
        if replaced is not None and not isinstance(replaced, ScaledForward) and not _is_bound_forward(self, replaced):
            return self.lns_plan_without_factor
        factor: dict[str, Any] = {self.lns_factor_name: self.lns_scale}
        return replace(self.lns_plan_without_factor, **factor)

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

    lns_how_applied = "outputs multiplied"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _times(super().forward(*args, **kwargs), self.lns_factor)  # type: ignore[misc]


class ScaledGainNorm(Scaled):
    """A norm of known arithmetic, with the factor in its gain and bias."""

    lns_arithmetic: NormArithmetic

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Return ``lns_scale * Norm(x)`` for the only input x of shape (..., width), whatever its argument's name."""
        (x,) = (*inputs, *named_inputs.values())
        if isinstance(x, self.lns_arithmetic.multiplied):
            return _times(super().forward(x), self.lns_factor)  # type: ignore[misc]
        return scaled_norm(self, x, self.lns_arithmetic, self.lns_factor, self.lns_backend)


def _forward_name(module: Any) -> str:
    """Return the attribute of a module that would hold a forward of its own.

    accelerate's hooks put their function in ``forward``. It calls ``_old_forward``, which outlives the hooks.
    """
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def _is_bound_forward(module: Any, forward: Any) -> bool:
    """Return true for the forward of the module's class, which accelerate's hooks keep as a bound method."""
    is_bound = getattr(forward, "__self__", None) is module
    return is_bound and forward.__func__ is getattr(type(module), "forward", None)


class ScaledForward:
    """The forward of a module instance, times the module's factor."""

    def __init__(self, module: Any, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _times(self.forward(*args, **kwargs), self.module.lns_factor)


def _times(output: Any, factor: Any) -> Any:
    return replace_first(output, first_output(output) * factor)


_subclasses: dict[tuple[type, type], Any] = {}


def picklable_subclass(mixin: type, stock: type) -> Any:
    """Return the picklable subclass of ``mixin`` and ``stock``, the same for each call."""
    if (mixin, stock) not in _subclasses:
        members = {"lns_bases": (mixin, stock), "__module__": stock.__module__, "__doc__": stock.__doc__}
        # Under the stock class's name, which Megatron-FSDP and quantization recipes read.
        _subclasses[mixin, stock] = type(stock.__name__, (mixin, stock), members)
    return _subclasses[mixin, stock]


def _new(mixin: type, stock: type) -> Any:
    kind = picklable_subclass(mixin, stock)
    return kind.__new__(kind)


def change_class(
    module: Any,
    kind: type,
    scale: float,
    *,
    plan_without_factor: Plan = Scaled.lns_plan_without_factor,
    factor_name: str = Scaled.lns_factor_name,
) -> None:
    """Change the class of ``module`` to ``kind``, a subclass of :class:`Scaled` and of its class; set the factor."""
    module.__class__ = kind
    module.lns_scale, module.lns_plan_without_factor, module.lns_factor_name = scale, plan_without_factor, factor_name
    module.lns_scale_tensor = torch.tensor(scale, dtype=torch.float64, device="cpu")
    module.lns_backend = choose_backend()


def scale(
    module: Any,
    factor: float,
    *,
    where: object,
    width: int,
    shape: tuple[int, ...] = (),
    arithmetic: NormArithmetic | None = None,
    mixin: type[Scaled] | None = None,
    plan_without_factor: Plan = Scaled.lns_plan_without_factor,
    factor_name: str = Scaled.lns_factor_name,
    respond: Callable[[Any], Response] | None = None,
) -> None:
    """Multiply the output of ``module`` by ``factor``, in place, and measure it against the output before.

    :param where: site of the module, for the message. :param width: the hidden size.
    :param shape: shape of an input that the module saw, for norms that do not take rows of ``width`` channels.
    :param arithmetic: that of a norm whose class is known. The factor is in gain and bias if the module's forward is
        not wrapped and measures ``factor`` times the framework's output; else the output is multiplied.
    :param mixin: another class than :class:`ScaledGainNorm` with the factor in its arithmetic. It is used likewise.
    :param plan_without_factor: the plan without this factor. :param factor_name: the factor's name in the plan.
    :param respond: measures the module; default :func:`olmo_lns.response.response`, which expects a norm.
    :raises MeasurementError: neither way gives ``factor`` times the output before. The module is left unchanged.

    Example: ``scale(norm, 0.5, where="block 4, attn", width=4096)``.
    """
    respond = respond or functools.partial(response, width=width, shape=shape)
    stock: Any = type(module)
    try:
        stock_response, problem = respond(module), ""
    except Exception as error:
        raise MeasurementError(
            f"{where} ({stock.__name__}): found a module that does not take rows of {width} channels "
            f"({type(error).__name__}: {error}); expected a norm of the stream."
        ) from error
    mixins: list[type[Scaled]] = [ScaledOutput]
    mixin = ScaledGainNorm if arithmetic is not None else mixin
    if mixin is not None and "forward" not in vars(module) and (mixin.lns_calls_forward or _takes_one_input(stock)):
        mixins.insert(0, mixin)
    for mixin in mixins:
        try:
            change_class(
                module,
                picklable_subclass(mixin, stock),
                factor,
                plan_without_factor=plan_without_factor,
                factor_name=factor_name,
            )
        except (AttributeError, TypeError) as error:
            object.__setattr__(module, "__class__", stock)
            raise MeasurementError(
                f"{where} ({stock.__name__}) takes no other class or no new attributes ({type(error).__name__}: "
                f"{error}). Expected a norm like PyTorch's, whose class can be replaced by a subclass. Use such a norm."
            ) from error
        if mixin is ScaledGainNorm:
            module.lns_arithmetic = arithmetic
        if (replaced := vars(module).get(name := _forward_name(module))) is not None:
            setattr(module, name, ScaledForward(module, replaced))
        try:
            problem = respond(module).problem(stock_response, factor)
        except Exception as error:  # the folded arithmetic reads an attribute that this norm lacks
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return
        restore_class(module, stock)
    raise MeasurementError(
        f"{where} ({stock.__name__}): measured {problem}. This module bypasses its forward; expected a norm whose "
        "output can be scaled."
    )


def forbid_fused_kernels(module: Any) -> None:
    """Keep PyTorch from kernels that read the weights of a norm instead of calling it, by a hook that changes nothing.

    ``nn.TransformerEncoderLayer`` uses such a kernel in eval mode without gradients, unless a module in it has a hook.
    """
    module.register_forward_pre_hook(_change_nothing)


def _change_nothing(module: Any, args: Any) -> None:
    """A forward pre-hook, of this module so that a copied or pickled model keeps it."""


def restore_class(module: Any, stock: type) -> None:
    """Give a scaled module its stock class and its former forward back."""
    for name in ("forward", "_old_forward"):
        forward = vars(module).get(name)
        if isinstance(forward, ScaledForward):
            setattr(module, name, forward.forward)
        elif _is_bound_forward(module, forward):
            setattr(module, name, types.MethodType(stock.forward, module))  # type: ignore[attr-defined]
    module.__class__ = stock
    for name in [name for name in vars(module) if name.startswith("lns_") and name != "lns_sites"]:
        delattr(module, name)
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _change_nothing]:
        del hooks[key]


def _takes_one_input(stock: Any) -> bool:
    """Return true if a class has a plain forward with one argument beside ``self``."""
    return is_plain(stock) and len(inspect.signature(stock.forward).parameters) == 2


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
