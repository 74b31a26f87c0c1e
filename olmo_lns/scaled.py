"""Multiply the output of a module by a factor, in place, and measure that the module now does so.

A scaled module stays the same object. Its class is replaced by a subclass of that class, so its parameters, hooks,
state-dict keys and the results of ``isinstance`` do not change. There are two kinds of subclasses.
:class:`ScaledGainNorm` is for a norm whose arithmetic is known, and multiplies its gain and bias.
:class:`ScaledOutput` is for any other module, and multiplies its output. :func:`scale` uses the first kind where it is
possible and measures the result. If this result is not the factor times the framework's output, the function falls
back to the second kind.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from dataclasses import replace
from typing import Any, Callable

import torch

from olmo_lns.errors import MeasurementError
from olmo_lns.measured import Measured
from olmo_lns.norm import NormArithmetic, choose_backend, is_dtensor, scaled_norm
from olmo_lns.response import Response, first_output, measure_response, replace_first
from olmo_lns.schemes import Plan

log = logging.getLogger("olmo_lns")


class PicklableSubclass:
    """Mixin whose subclasses can be pickled although :func:`picklable_subclass` creates them at run time."""

    def __init_subclass__(cls, **options: Any) -> None:
        # A framework's class may register each of its subclasses by name. A class of picklable_subclass has the name of
        # its stock class, so it must not be registered.
        if "lns_bases" not in vars(cls):
            super().__init_subclass__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, stock = type(self).__dict__.get("lns_bases", (None, None))
        if mixin is None:
            return super().__reduce_ex__(protocol)
        return _new, (mixin, stock), self.__getstate__() if hasattr(self, "__getstate__") else vars(self)


class Scaled(PicklableSubclass):
    """Mixin that adds a factor to a module class of a framework."""

    # Attributes of a scaled module. restore_class removes those that have an annotation here or in a subclass.
    # The factor is always a plain float. A buffer would lose its value on the meta device. If the attribute could be
    # None, ``forward`` would need a branch, and torch.compile would compile one graph for each layer.
    lns_scale: float
    lns_scale_tensor: torch.Tensor
    lns_backend: Any
    #: The plan that the module would compute without its factor, and the field of the plan which the factor sets.
    lns_plan_without_factor: Plan = Plan()
    lns_factor_name: str = "norm_scale"
    #: True if the forward of the mixin calls the framework's forward, so that wrappers around that one still run.
    lns_calls_forward = False
    #: How the factor is applied, as text for the start-up line. If it is empty, the line names the norm's backend.
    lns_how_applied: str = ""

    def lns_plan(self, sub_layer: str) -> Plan:
        """Return the plan that the module computes for a sub-layer.

        If other code has replaced ``forward`` on the instance, the factor is lost, and the plan does not contain it.
        """
        replaced = vars(self).get(_forward_name(self))
        if replaced is not None and not isinstance(replaced, ScaledForward) and not _is_bound_forward(self, replaced):
            return self.lns_plan_without_factor
        factor: dict[str, Any] = {self.lns_factor_name: self.lns_scale}
        return replace(self.lns_plan_without_factor, **factor)

    @property
    def lns_scale_in_forward(self) -> Any:
        """The factor as a float, or as an equal 0-d tensor on the CPU while torch.compile traces the module.

        With a float, Dynamo would compile two graphs. It treats the float of the first block as a constant, and that of
        the second block as an input. If activation checkpointing then recomputes the first block, it runs the second
        graph, which saves other tensors, and torch raises a CheckpointError. A tensor is an input from the start, so
        all blocks share one graph. It is neither a parameter nor a buffer, so state dicts, the meta device and FSDP
        are not affected.
        """
        return self.lns_scale_tensor if torch.compiler.is_compiling() else self.lns_scale

    def extra_repr(self) -> str:
        base = super().extra_repr()  # type: ignore[misc]
        return f"{base}{', ' if base else ''}lns_scale={self.lns_scale:.6g}"


class ScaledOutput(Scaled):
    """A module of any class whose output, or the first of its outputs, is multiplied by the factor."""

    lns_how_applied = "outputs multiplied"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _times(super().forward(*args, **kwargs), self.lns_scale_in_forward)  # type: ignore[misc]


class ScaledGainNorm(Scaled):
    """A norm whose arithmetic is known. The factor multiplies its gain and bias."""

    lns_arithmetic: NormArithmetic

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Return ``lns_scale * Norm(x)`` for the only input x of shape (..., width), whatever its argument's name."""
        (x,) = (*inputs, *named_inputs.values())
        if self.lns_arithmetic.multiplies_dtensors and is_dtensor(x):
            return _times(super().forward(x), self.lns_scale_in_forward)  # type: ignore[misc]
        return scaled_norm(self, x, self.lns_arithmetic, self.lns_scale_in_forward, self.lns_backend)


def _forward_name(module: Any) -> str:
    """Return the name of the instance attribute in which other code may have replaced a module's forward.

    This is ``forward``, unless accelerate has hooked the module. Its hooks put a function of accelerate there, which
    calls ``_old_forward``. That attribute remains when the hooks are removed.
    """
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def _is_bound_forward(module: Any, forward: Any) -> bool:
    """Return true if ``forward`` is the forward of the module's class, bound to the module by accelerate's hooks."""
    is_bound = getattr(forward, "__self__", None) is module
    return is_bound and forward.__func__ is getattr(type(module), "forward", None)


class ScaledForward:
    """A forward that replaces another one on a module instance, and multiplies its output by the module's factor."""

    def __init__(self, module: Any, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _times(self.forward(*args, **kwargs), self.module.lns_scale_in_forward)


def _times(output: Any, factor: Any) -> Any:
    return replace_first(output, first_output(output) * factor)


_subclasses: dict[tuple[type, type], Any] = {}


def picklable_subclass(mixin: type, stock: type) -> Any:
    """Return a picklable class that inherits from ``mixin`` and ``stock``. Each pair has one such class."""
    if (mixin, stock) not in _subclasses:
        members = {"lns_bases": (mixin, stock), "__module__": stock.__module__, "__doc__": stock.__doc__}
        # The class has the name of the stock class, which Megatron-FSDP and quantization recipes look up.
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
    """Change the class of ``module`` and set its factor.

    :param kind: a subclass of :class:`Scaled` and of the present class of the module.
    :param scale: the factor, dimensionless.
    :param plan_without_factor: the plan that the module computes without its factor.
    :param factor_name: the field of the plan which the factor sets.
    """
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
    measure: Callable[[Any], Response] | None = None,
) -> frozenset[Measured]:
    """Multiply the output of ``module`` by ``factor``, in place, and compare its output with the one before.

    :param where: place of the module in the model, for error messages.
    :param width: the hidden size.
    :param shape: shape of an input that the module received in the model. It is needed for norms that do not take rows
        of ``width`` channels.
    :param arithmetic: the arithmetic of a norm whose class is known. Its gain and bias are then multiplied, unless its
        forward is wrapped or the result is not ``factor`` times the framework's output. In these cases, and for None,
        the output is multiplied. The reason is in the start-up line, and its details are in the log.
    :param mixin: a class that is tried under the same conditions if ``arithmetic`` is None.
    :param plan_without_factor: the plan that the module computes without this factor.
    :param factor_name: the field of the plan which the factor sets.
    :param measure: a function that measures the module. The default is :func:`olmo_lns.response.measure_response`,
        which expects a norm.
    :returns: what was measured, which is the output and the gradient for a norm.
    :raises MeasurementError: if neither way results in ``factor`` times the output before. The module is left
        unchanged.

    Example: ``scale(norm, 0.5, where="block 4, attn", width=4096)``.
    """
    measure = measure or functools.partial(measure_response, width=width, shape=shape)
    stock: Any = type(module)
    try:
        before = measure(module)
    except Exception as error:
        raise MeasurementError(
            f"{where} ({stock.__name__}): this module does not take rows of {width} channels "
            f"({type(error).__name__}: {error}). Expected a norm of the stream."
        ) from error
    become = functools.partial(
        _become, module, factor=factor, where=where, plan_without_factor=plan_without_factor, factor_name=factor_name
    )
    preferred = ScaledGainNorm if arithmetic is not None else mixin
    reason = "" if preferred is None else _reason_against(preferred, module)
    if preferred is not None and not reason:
        become(preferred)
        if preferred is ScaledGainNorm:
            module.lns_arithmetic = arithmetic
        reason, problem = _difference(measure, module, before, factor)
        if not reason:
            return before.measured
        restore_class(module, stock)
        log.info("%s (%s): %s: %s. The output is multiplied instead.", where, stock.__name__, reason, problem)
    become(ScaledOutput)
    _, problem = _difference(measure, module, before, factor)
    if problem:
        restore_class(module, stock)
        raise MeasurementError(
            f"{where} ({stock.__name__}): with its output multiplied, the norm has {problem}. Expected a norm whose "
            "forward computes its output. A kernel may compute it elsewhere. Switch such a kernel off, or use another "
            "norm."
        )
    if reason:
        module.lns_how_applied = f"outputs multiplied ({reason})"
    return before.measured


def _become(
    module: Any, mixin: type[Scaled], *, factor: float, where: object, plan_without_factor: Plan, factor_name: str
) -> None:
    """Change the class of a module to the subclass with ``mixin``, also if its forward is replaced on the instance.

    :raises MeasurementError: if the module takes no other class. It is left unchanged.
    """
    stock: Any = type(module)
    try:
        kind = picklable_subclass(mixin, stock)
        change_class(module, kind, factor, plan_without_factor=plan_without_factor, factor_name=factor_name)
    except (AttributeError, TypeError) as error:
        object.__setattr__(module, "__class__", stock)
        raise MeasurementError(
            f"{where} ({stock.__name__}) cannot get another class and new attributes ({type(error).__name__}: "
            f"{error}). Expected a norm like PyTorch's, whose class can be replaced by a subclass. Use such a norm."
        ) from error
    if (replaced := vars(module).get(name := _forward_name(module))) is not None:
        setattr(module, name, ScaledForward(module, replaced))


def _difference(measure: Callable[[Any], Response], module: Any, before: Response, factor: float) -> tuple[str, str]:
    """Measure a module whose gain or output is multiplied, and compare it with the module before.

    :returns: for the start-up line, why the gain cannot be multiplied, and a description of the difference. Both are
        ``""`` if the module computes ``factor`` times what it computed before.
    """
    try:
        problem = measure(module).problem(before, factor)
    except Exception as error:  # the arithmetic needs an attribute that is missing
        return "the norm could not be computed with a multiplied gain", f"{type(error).__name__}: {error}"
    return ("the multiplied gain gave another result" if problem else ""), problem


def _reason_against(mixin: type[Scaled], module: Any) -> str:
    """Return the reason why a module cannot be scaled by ``mixin``, or ``""`` if that can be tried."""
    if "forward" in vars(module):
        return "the forward is replaced on the norm"
    if not (mixin.lns_calls_forward or _takes_one_input(type(module))):
        return "the forward of the norm is wrapped"
    return ""


def forbid_fused_kernels(module: Any) -> None:
    """Register a hook that changes nothing, so that PyTorch calls the norm instead of a fused kernel.

    In eval mode without gradients, ``nn.TransformerEncoderLayer`` runs a kernel that reads the weights of its norms and
    does not call them. It does not use this kernel if a module in it has a hook.
    """
    module.register_forward_pre_hook(_keep_args)


def _keep_args(module: Any, args: Any) -> None:
    """Do nothing, as a forward pre-hook. It is a function of this module so that models with it can be pickled."""


def restore_class(module: Any, stock: type) -> None:
    """Restore the class and the forward that a module had before it was scaled."""
    for name in ("forward", "_old_forward"):
        forward = vars(module).get(name)
        if isinstance(forward, ScaledForward):
            setattr(module, name, forward.forward)
        elif _is_bound_forward(module, forward):
            setattr(module, name, types.MethodType(stock.forward, module))  # type: ignore[attr-defined]
    for name in _declared_attributes(type(module)):
        vars(module).pop(name, None)
    module.__class__ = stock
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _keep_args]:
        del hooks[key]


def _declared_attributes(kind: type) -> set[str]:
    """Return the names of the attributes that :class:`Scaled` and its subclasses among the bases of a class declare."""
    mixins = [base for base in kind.__mro__ if issubclass(base, Scaled)]
    return {name for mixin in mixins for name in inspect.get_annotations(mixin)}


def _takes_one_input(stock: Any) -> bool:
    """Return true if a class has its original forward, with one argument besides ``self``."""
    return has_original_forward(stock) and len(inspect.signature(stock.forward).parameters) == 2


def has_original_forward(stock: type) -> bool:
    """Return true if the forward of a class is defined in its source file, and neither decorated nor replaced."""
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
