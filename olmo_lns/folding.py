"""Fold a scheme: multiply its factors into the weights of a built model, in place.

A norm whose output is multiplied by ``s`` computes the same as the stock norm with gain and bias times ``s``. A
zero-centered norm stores g, its gain minus one, and g becomes ``s * (1 + g) - 1``. If a norm has no gain, the weights
of the linear layers after it are multiplied instead. Each product is computed in fp64 and rounded once, to the
dtype of the weight.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from olmo_lns import initialization, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.response import first_output, replace_first

#: One factor for a whole parameter, or a fp64 tensor of shape (rows,) with a factor for each row.
Factor = float | torch.Tensor
#: Allowed difference of the output of a whole model, relative to its size: what the rounding of the folded weights
#: changes in fp32, and in 16 bits.
_TOLERANCE, _TOLERANCE_16_BITS = 1e-4, 0.05
#: The same for one norm that gets fp64. Many norms compute their statistics in fp32 even then.
_TOLERANCE_NORM = 1e-5
#: Allowed difference of the outputs of a model, relative to their size, in the search for a hidden reader of a norm.
#: The search doubles the output of the norm and halves the input of each linear layer that is known to read the norm.
#: These two changes cancel exactly, because a power of two changes no digits. If the outputs of the model differ by
#: more than this value, other code also reads the norm.
_TOLERANCE_READERS = 1e-3


def multiplied(data: torch.Tensor, factor: Factor, dtype: torch.dtype | None, shift: float = 0.0) -> torch.Tensor:
    """Return ``(data + shift) * factor - shift``, computed in fp64 and rounded once.

    :param data: a tensor of any shape.
    :param factor: the factor, dimensionless. A tensor has one value for each row of ``data``.
    :param dtype: dtype of the result; None keeps the dtype of ``data``.
    :param shift: 1.0 for a zero-centered gain, otherwise 0.0.

    Example: ``multiplied(gain, 0.5, torch.bfloat16)``.
    """
    if isinstance(factor, torch.Tensor):
        factor = factor.reshape(-1, *[1] * (data.dim() - 1))
    return ((data.double() + shift) * factor - shift).to(dtype or data.dtype)


@torch.no_grad()
def fold_norms(model: nn.Module, run: Callable[[], Any], dtype: torch.dtype | None = None) -> None:
    """Fold the factor of every scaled norm into its gain and bias, and remove the scheme from the model.

    The model is run before and after the change. All of its outputs must stay the same.

    :param run: runs one forward of the model in eval mode and returns the output. The forward also shows which linear
        layers read a norm without a gain.
    :param dtype: dtype of the changed parameters; None keeps their dtypes. Other parameters are not converted.
    :raises LNSConfigError: if a factor cannot be folded into the weights. The model is left unchanged.
    :raises MeasurementError: if a norm does not multiply by its gain, or the output of the model changed. The model is
        left unchanged.

    Example: ``fold_norms(model, lambda: model(ids))``.
    """
    stock = sites.stock_classes(model)
    norms = {name: module for name, module in model.named_modules() if module in stock}
    bare = [norm for norm in norms.values() if not list(norm.parameters())]
    readers = _linear_readers(model, bare, run) if bare else {}
    shapes: dict[Any, tuple[int, ...]] = {}

    def note(norm: Any, args: Any, kwargs: Any) -> None:
        shapes[norm] = tuple(next(iter((*args, *kwargs.values()))).shape)

    hooks = [norm.register_forward_pre_hook(note, with_kwargs=True) for norm in norms.values()]
    expected = _outputs(run, hooks)
    values = _folded_values(model, norms, readers, shapes, dtype)
    with _tentatively(norms.values(), values):
        names = {parameter: name for name, parameter in model.named_parameters()}
        check_finite((names[parameter], value) for parameter, value in values.items())
        _require_same_output(model, expected, _outputs(run, []), [*values.values()])
    for parameter, value in values.items():
        parameter.data = value
    sites.remove_scheme(model)
    for norm in bare:
        initialization.mark_folded(norm)


def _folded_values(
    model: nn.Module,
    norms: Mapping[str, Any],
    readers: Mapping[Any, list[Any]],
    shapes: Mapping[Any, tuple[int, ...]],
    dtype: torch.dtype | None,
) -> dict[nn.Parameter, torch.Tensor]:
    """Return the new values of the parameters that get a factor. Nothing is changed.

    :param norms: name of each scaled norm -> the norm.
    :param readers: norm without weights -> the linear layers that read it.
    :param shapes: norm -> shape of an input that it received in the model.
    :raises LNSConfigError: if other modules use a parameter that gets a factor.
    :raises MeasurementError: if a norm does not multiply by its gain.
    """
    folded_values: dict[nn.Parameter, torch.Tensor] = {}
    owners = _owners(model)
    for name, norm in norms.items():
        folded = {module.weight: multiplied(module.weight, norm.lns_scale, dtype) for module in readers.get(norm, ())}
        alike = [other for other in norms.values() if other.lns_scale == norm.lns_scale]
        changed = {part for other in alike for each in (other, *readers.get(other, ())) for part in each.modules()}
        for parameter, value in (folded or _folded(name, norm, dtype, shapes.get(norm, ()))).items():
            others = [owner for module, owner in owners.get(parameter, {}).items() if module not in changed]
            if others and norm.lns_scale != 1.0:
                raise LNSConfigError(
                    f"The factor of {name} would be multiplied into a weight that {others[0]} uses as well, which "
                    f"would change what {others[0]} computes. Expected a weight that no other module uses. Give "
                    f"{others[0]} a parameter of its own with the same values, and fold again."
                )
            folded_values[parameter] = value
    return folded_values


@contextmanager
def _tentatively(norms: Collection[Any], values: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Give parameters new values and norms the factor 1. If the ``with`` block raises, undo both.

    The parameters keep their dtypes, because the other weights do, so that the model runs.
    """
    saved = {parameter: parameter.data for parameter in values}
    factors = {norm: (norm.lns_scale, norm.lns_scale_tensor) for norm in norms}
    for parameter, value in values.items():
        parameter.data = value.to(parameter.dtype)
    for norm in norms:
        norm.lns_scale, norm.lns_scale_tensor = 1.0, torch.ones_like(norm.lns_scale_tensor)
    try:
        yield
    except BaseException:
        for parameter, data in saved.items():
            parameter.data = data
        for norm, (factor, tensor) in factors.items():
            norm.lns_scale, norm.lns_scale_tensor = factor, tensor
        raise


def _owners(model: nn.Module) -> dict[nn.Parameter, dict[nn.Module, str]]:
    """Map each parameter to the modules that have it, each with its name."""
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, {})[module] = name
    return owners


def _require_same_output(
    model: nn.Module, expected: list[torch.Tensor], found: list[torch.Tensor], changed: list[torch.Tensor]
) -> None:
    """Check that a fold has not changed the outputs of a model.

    :param expected: the outputs before the fold.
    :param found: the outputs after it.
    :param changed: the new values of the changed weights, whose dtypes determine the tolerance.
    :raises MeasurementError: if an output differs by more than the rounding of these dtypes.
    """
    for before, after in itertools.zip_longest(expected, found):
        difference = math.inf
        if before is not None and after is not None and before.shape == after.shape:
            finite = before.isfinite()
            size = float(before[finite].double().norm())
            difference = float((after[finite].double() - before[finite].double()).norm()) / max(size, 1e-30)
        dtypes = {each.dtype for each in (before, *changed) if each is not None}
        tolerance = _TOLERANCE if dtypes <= {torch.float32, torch.float64} else _TOLERANCE_16_BITS
        if not difference <= tolerance:  # also true for NaN
            raise MeasurementError(
                f"{type(model).__name__}: after folding, the output differs by {difference:.2g} of its size. Expected "
                "the same output as before. Other code in the model reads the weights of the norms. The model was not "
                "changed, so you can export it without folding, or run it with olmo-lns."
            )


def _folded(
    name: str, norm: Any, dtype: torch.dtype | None, shape: tuple[int, ...] = ()
) -> dict[nn.Parameter, torch.Tensor]:
    """Return the new gain and bias of a norm, after a check in fp64 that they have the effect of the factor.

    :param shape: shape of an input that the norm received in the model, for norms that do not take rows.
    :raises MeasurementError: if no new gain, zero-centered or not, has this effect.
    """
    factor, parameters = norm.lns_scale, dict(norm.named_parameters())
    if factor == 1.0:
        return {}
    stock = copy.deepcopy(norm)
    sites.remove_scheme(stock)
    if "_hf_hook" in vars(stock):  # accelerate's hook moves inputs between devices
        for attribute in ("forward", "_old_forward", "_hf_hook"):
            vars(stock).pop(attribute, None)
    stock.double()
    gain, problem = next(iter(parameters.values())), ""
    for input_shape in ((4, 1, gain.numel()), *([(4, *shape[1:])] if shape else [])):
        x = torch.randn(input_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
        first = next(iter(parameters))
        for centered in ((), [key for key in parameters if "bias" not in key], [first]):
            shifts = {key: float(key in centered) for key in parameters}
            candidate = {
                key: multiplied(parameter, factor, torch.float64, shifts[key]) for key, parameter in parameters.items()
            }
            try:
                expected = factor * first_output(stock(x.to(gain.device)))
                actual = first_output(torch.func.functional_call(stock, candidate, (x.to(gain.device),)))
            except Exception as error:  # the norm does not take an input of this shape
                problem = f" It raised {type(error).__name__}: {error}."
                break
            if float((actual - expected).norm()) <= _TOLERANCE_NORM * float(expected.norm()):
                return {parameters[key]: value.to(dtype or parameters[key].dtype) for key, value in candidate.items()}
    raise MeasurementError(
        f"{name}: after gain and bias of this {type(norm).__name__} were multiplied by {factor:.4g}, its output is not "
        f"{factor:.4g} times the output before.{problem} Expected a norm with a gain, zero-centered or not. Run this "
        "model with olmo-lns instead of folding it."
    )


def _linear_readers(model: nn.Module, norms: list[Any], run: Callable[[], Any]) -> dict[Any, list[Any]]:
    """Map each norm to the linear layers that read its output unchanged.

    :raises LNSConfigError: if something else than linear layers reads the output of a norm, if such a layer has an
        adapter, or if a matrix in the block of the norm did not run, since it may read the norm too.
    """
    readers: dict[Any, list[Any]] = {norm: [] for norm in norms}
    outputs: dict[int, tuple[Any, torch.Tensor]] = {}
    ran: set[nn.Module] = set()
    others: list[tuple[Any, Any]] = []  # a norm, and a module without one matrix as its weight that reads it

    def wrote(norm: Any, args: Any, output: Any) -> None:
        y = first_output(output)
        outputs[y.data_ptr()] = norm, y  # kept alive, so that its memory is not reused

    def read(module: nn.Module, args: Any) -> None:
        ran.add(module)
        x = args[0] if args and torch.is_tensor(args[0]) else None
        norm, output = (None, None) if x is None else outputs.get(x.data_ptr(), (None, None))
        if x is None or output is None or output.numel() != x.numel() or module in readers[norm]:
            return
        if has_weight(module):
            readers[norm].append(module)
        else:
            others.append((norm, module))

    def has_weight(module: Any) -> bool:
        return getattr(getattr(module, "weight", None), "ndim", 0) >= 2

    matrices = [m for m in model.modules() if has_weight(m) or any(p.dim() > 1 for p in m.parameters(recurse=False))]
    handles = [norm.register_forward_hook(wrote) for norm in norms]
    expected = _outputs(run, handles + [module.register_forward_pre_hook(read) for module in matrices])
    all_readers = [module for each in readers.values() for module in each]
    adapters = {child for module in model.modules() if hasattr(module, "base_layer") for child in module.modules()}
    if adapters.intersection(all_readers):
        raise LNSConfigError(
            "A factor would be multiplied into a projection with an adapter, and the adapter would not be multiplied. "
            "Merge the adapters first (merge_and_unload())."
        )
    handles = [norm.register_forward_hook(_doubled) for norm in norms]
    halved = [m.register_forward_pre_hook(lambda module, args: (args[0] / 2.0, *args[1:])) for m in all_readers]
    doubled = _outputs(run, handles + halved)
    pairs = zip(doubled, expected, strict=True)
    finite = [(a, b) for a, b in pairs if b.numel() and b.isfinite().all()]  # others are masks
    is_same = all(float((a - b).abs().max()) <= _TOLERANCE_READERS * float(b.abs().max()) for a, b in finite)
    if not all(readers.values()) or not is_same:
        names = {module: name for name, module in model.named_modules()}
        unread = [(norm, None) for norm, each in readers.items() if not each]
        norm, other = next(iter(others + unread), (norms[0], None))
        reader = "something else than linear layers" if other is None else f"{names[other]} ({type(other).__name__})"
        raise LNSConfigError(
            f"{type(model).__name__}: {names[norm]} has no weights and is read by {reader}. Expected linear layers "
            "only, because the factor has to be multiplied into their weights. Give the norms of this model weights, "
            "or run it with olmo-lns."
        )
    _require_all_ran(model, readers, set(matrices) - ran)
    return readers


def _doubled(module: Any, args: Any, output: Any) -> Any:
    """Multiply the output of a module by 2, as a forward hook."""
    return replace_first(output, 2.0 * first_output(output))


def _require_all_ran(model: nn.Module, readers: Mapping[Any, list[Any]], idle: set[nn.Module]) -> None:
    """Check that the example runs all matrices in the block of each norm, since each of them may read the norm.

    :param readers: norm -> the linear layers that read it.
    :param idle: the modules with matrices that did not run.
    :raises LNSConfigError: if one of them is in the block of a norm. The message names the first.
    """
    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):  # it runs its projection as a function
            idle = idle - {module.out_proj}
    for norm, each in readers.items():
        path = names[norm]
        while path and not all(names[module].startswith(f"{path}.") for module in each):
            path = path.rpartition(".")[0]  # ends at the smallest module with the norm and its readers
        if skipped := [names[module] for module in model.get_submodule(path).modules() if module in idle]:
            raise LNSConfigError(
                f"{names[norm]} has no weights, so its factor goes into the linear layers that read it. The example "
                f"does not run {skipped[0]}, and this layer may read the norm, too. Expected an example that runs "
                "every part of the block, such as all experts. Pass a longer example=, or a function that runs "
                "several inputs."
            )


def _outputs(run: Callable[[], Any], handles: list[Any]) -> list[torch.Tensor]:
    """Run one forward, remove the hooks, and return all floating tensors of the output.

    :raises LNSConfigError: if the output has no floating tensor.
    """
    try:
        torch.manual_seed(0)
        output = run()
    finally:
        for handle in handles:
            handle.remove()
    tensors = [leaf for leaf in tree_leaves(output_as_container(output)) if torch.is_tensor(leaf)]
    if not any(tensor.is_floating_point() for tensor in tensors):
        raise LNSConfigError(
            f"The forward of the example returned an object of the type {type(output).__name__}, which has no "
            "floating-point tensors. Expected "
            "an output that can be compared before and after. Pass as example= a function that returns the model's "
            "tensors."
        )
    return [tensor.detach().clone() for tensor in tensors if tensor.is_floating_point()]


def output_as_container(output: Any) -> Any:
    """Convert a model's output, such as an output class of transformers, to a container that PyTorch can traverse."""
    if isinstance(output, Mapping):
        return dict(output)
    return vars(output) if dataclasses.is_dataclass(output) and hasattr(output, "__dict__") else output


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that all weights are finite.

    :raises LNSConfigError: if a weight has values that are NaN or infinite. The message names it and counts them.
    """
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise LNSConfigError(
                f"{name} has NaN or infinite values ({bad} of {tensor.numel()}). Expected finite weights. Use an "
                "earlier checkpoint, or a dtype with the range for them (bf16 or fp32)."
            )
