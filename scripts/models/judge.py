"""Run one row: build the model, apply LayerNorm Scaling, and compare with hooks on the expected norms.

The reference is a deep copy of the stock model with a forward hook on each expected norm of block l that multiplies its
output by l**-0.5. It shares no code with the package.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from expectation import ACCEPTED, NORMS, REFUSED, Row, Sites
from torch import nn

#: The largest relative difference to the reference that counts as equal.
TOLERANCE = 1e-5

RIGHT, REFUSED_WRONGLY, SILENTLY_WRONG, WRONG = "right", "refused wrongly", "SILENTLY WRONG", "wrong"
NOT_INSTALLED, NOT_BUILT, EXPECTED = "not installed", "not built", "expectation holds"


def seed() -> None:
    """Seed all generators, so that two models draw the same dropout."""
    torch.manual_seed(1)
    random.seed(1)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(1)


def build(row: Row) -> tuple[nn.Module, Any]:
    """Build a row's model in fp32 with fresh weights, so that each branch has an effect.

    A matrix that starts at zero (an output projection, a gate of adaLN-Zero) is drawn, since no norm before it
    would change the output. A matrix that was drawn small is scaled up, so that each factor moves the output by far
    more than the tolerance. A learned scale of a branch is set to one. Norms keep the gains that their class gave them.
    """
    seed()
    model, example = row.build()
    model = model.float()
    seed()
    norm_parameters = {
        id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(False)
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not parameter.any():
                parameter.normal_(std=0.5 / math.sqrt(parameter[0].numel()))
            elif parameter.dim() <= 1 and id(parameter) not in norm_parameters and is_scale(name, parameter):
                parameter.fill_(1.0)
        if row.source != "package:transformers":  # its integration judges the initialization
            for module in model.modules():
                weight = getattr(module, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.dim() >= 2 and not isinstance(module, nn.Embedding):
                    gain = float(weight.std()) * math.sqrt(weight[0].numel())
                    if 0 < gain < 0.6:
                        weight.mul_(0.8 / gain)
    return model, example


def is_scale(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a vector is a learned scale of a branch that starts near zero."""
    last = name.rsplit(".", 1)[-1]
    return "bias" not in last and bool((parameter.abs() < 0.2).all()) and last in SCALES


#: The names of learned scales of branches in the packages of the table.
SCALES = {"gamma", "gamma_1", "gamma_2", "gamma1", "gamma2", "scale", "resweight", "layer_scale", "layerscale", "alpha"}


def run(model: nn.Module, example: Any) -> list[torch.Tensor]:
    """Return the floating-point outputs of one seeded forward, in order."""
    seed()
    if isinstance(example, dict):
        output = model(**example)
    elif isinstance(example, tuple):
        output = model(*example)
    elif callable(example) and not isinstance(example, torch.Tensor):
        output = example(model)
    else:
        output = model(example)
    found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if not found:
        raise RuntimeError("The forward returned no floating-point tensor.")
    return found


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        yield from tensors(vars(value))


def measured(model: nn.Module, example: Any) -> dict[str, list[torch.Tensor]]:
    """Return outputs in {train, eval} x {grad, no_grad}, and the gradients of all parameters in training."""
    found = {}
    modes = {module: module.training for module in model.modules()}
    for train, grad in itertools.product((True, False), (True, False)):
        model.train(train)
        name = f"{'train' if train else 'eval'}, {'grad' if grad else 'no_grad'}"
        with torch.set_grad_enabled(grad):
            outputs = run(model, example)
        found[name] = [output.detach().clone() for output in outputs]
        if grad and train and any(output.requires_grad for output in outputs):
            generator = torch.Generator().manual_seed(2)
            loss = sum(
                (output * torch.randn(output.shape, generator=generator, dtype=torch.float32)).sum()
                for output in outputs
                if output.requires_grad
            )
            parameters = [p for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            found["gradients"] = [torch.zeros(()) if g is None else g.detach() for g in gradients]
    for module, training in modes.items():
        module.training = training
    return found


def difference(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    """Return the largest difference in each mode, relative to the largest expected value.

    Each output is compared by itself. A gradient is compared with the largest value of its parameter's gradient, or
    with a hundredth of the largest of all where it is smaller, since a gradient that is zero in theory is rounding.
    """
    result = {}
    for mode, tensors_of_mode in expected.items():
        if len(found.get(mode, ())) != len(tensors_of_mode):
            result[mode] = math.inf
            continue
        largest = max((float(t.abs().max()) for t in tensors_of_mode if t.numel()), default=0.0)
        floor = largest / 100 if mode == "gradients" else 0.0
        worst = 0.0
        for one, two in zip(found[mode], tensors_of_mode, strict=True):
            if one.shape != two.shape:
                worst = math.inf
            elif two.numel():
                away = float((one.double() - two.double()).abs().nan_to_num(0.0).max())
                if not torch.equal(one.isfinite(), two.isfinite()):
                    away = math.inf
                size = max(float(two.abs().nan_to_num(0.0, 0.0, 0.0).max()), floor)
                worst = max(worst, away / size if size else (0.0 if away == 0 else math.inf))
        result[mode] = worst
    return result


def hooked(model: nn.Module, expected: Sites, without: str | None = None) -> nn.Module:
    """Return a deep copy of a stock model with hooks that multiply the expected norms' outputs by l**-0.5."""
    model = copy.deepcopy(model)

    def multiply(factor: float) -> Callable:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (output[0] * factor, *output[1:])
            return output * factor

        return hook

    for l, names in enumerate(expected, 1):  # noqa: E741 - the number of a block in the field
        for name in names:
            if name != without:
                model.get_submodule(name).register_forward_hook(multiply(l**-0.5))
    return model


def weakest(model: nn.Module, example: Any, expected: Sites) -> tuple[str, float]:
    """Return the expected norm whose hook matters least, and by how much: the comparison's power."""
    with torch.no_grad():
        whole = {"": [output.clone() for output in run(hooked(model, expected), example)]}
        effects = {}
        for names in expected[1:]:
            for name in names:
                effects[name] = difference({"": run(hooked(model, expected, name), example)}, whole)[""]
    name = min(effects, key=effects.__getitem__)
    return name, effects[name]


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a refused ``apply`` must not change."""
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)},
        "modules": {name: marks(module) for name, module in model.named_modules()},
    }


def marks(module: nn.Module) -> tuple:
    """Return a module's class, mode and hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (type(module), module.training, "forward" in vars(module), *map(len, hooks))


def changed(model: nn.Module, before: dict[str, Any]) -> str:
    """Return what differs from an earlier ``state``, or an empty string."""
    after = state(model)
    if list(after["weights"]) != list(before["weights"]):
        return "keys of the state dict"
    for key, value in before["weights"].items():
        if value.dtype != after["weights"][key].dtype or not torch.equal(
            value.nan_to_num() if value.is_floating_point() else value,
            after["weights"][key].nan_to_num() if value.is_floating_point() else after["weights"][key],
        ):
            return f"weights: {key}"
    for name, value in before["modules"].items():
        if after["modules"].get(name) != value:
            return f"module {name}: {value} became {after['modules'].get(name)}"
    return ""


def apply(model: nn.Module, example: Any, **keywords: Any) -> dict[str, Any]:
    """Call ``olmo_lns.apply`` and return what it said: the error, or the start-up line and the scaled modules."""
    import olmo_lns
    from olmo_lns.errors import LNSError

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            olmo_lns.apply(model, "lns", example=example, **keywords)
    except LNSError as error:
        return {"error": f"{type(error).__name__}: {error}", "kind": "refused"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "kind": "raw error"}
    lines = [line for line in told.getvalue().splitlines() if "LayerNorm Scaling" in line]
    factors = {
        name: m.lns_scale for name, m in model.named_modules() if isinstance(getattr(m, "lns_scale", None), float)
    }
    return {"kind": "accepted", "line": lines[-1] if lines else "", "factors": factors}


def modules(model: nn.Module, expected: Sites) -> list[Any]:
    """Return the norms of each block: a tuple, or one norm that both branches share."""
    found = [tuple(model.get_submodule(name) for name in names) for names in expected]
    return [norms if len(norms) > 1 else norms[0] for norms in found]


def given(row: Row, model: nn.Module) -> dict[str, Any]:
    """Return the keywords with which a row calls ``apply``."""
    if row.given is not None:
        return {"norms": modules(model, row.given)}
    if isinstance(row.blocks, str):
        return {"blocks": model.get_submodule(row.blocks)}
    if row.blocks is not None:
        return {"blocks": [model.get_submodule(name) for name in row.blocks]}
    return {}


def judge(row: Row, check: bool = False) -> dict[str, Any]:
    """Return a row's result. ``check`` stops before ``apply``: it builds the model and tests the expectation."""
    result: dict[str, Any] = {"expected": row.verdict}
    try:
        model, example = build(row)
        stock = copy.deepcopy(model)
        outputs = measured(copy.deepcopy(model), example)
        if any(not bool(tensor.isfinite().any()) for tensor in outputs["eval, grad"]):
            raise RuntimeError("The stock model's output is not finite.")
        if row.sites:
            reference = measured(hooked(stock, row.sites), example)
            result["effect"] = max(difference(outputs, reference).values())
            result["weakest"] = weakest(stock, example, row.sites)
            if result["weakest"][1] < 20 * TOLERANCE:
                raise RuntimeError(
                    f"The factor of {result['weakest'][0]} changes the output by {result['weakest'][1]:.1e}."
                )
    except Exception as error:
        return result | {"verdict": NOT_BUILT, "found": f"{type(error).__name__}: {error}"}
    if check:
        return result | {"verdict": EXPECTED, "found": ""}

    before = state(model)
    first = apply(model, example, **given(row, model))
    result |= {"first": first}
    if first["kind"] != "accepted":
        result["changed"] = changed(model, before)
    if row.verdict == REFUSED:
        return result | refused(first, model, stock, example, result.get("changed", ""))
    if row.verdict == NORMS and first["kind"] != "accepted":
        if first["kind"] == "raw error" or result["changed"]:
            return result | {"verdict": WRONG, "found": first["error"]}
        names_it = "norms=" in first["error"]
        second = apply(model, example, norms=modules(model, row.sites))
        result |= {"second": second}
        if second["kind"] != "accepted":
            return result | {"verdict": REFUSED_WRONGLY, "found": second["error"]}
        result |= compared(model, example, reference, "accepted with norms=")
        if result["verdict"] == RIGHT and not names_it:
            result |= {"verdict": WRONG, "found": "the message does not name norms=: " + first["error"]}
        return result
    if first["kind"] != "accepted":
        verdict = REFUSED_WRONGLY if first["kind"] == "refused" and not result["changed"] else WRONG
        return result | {"verdict": verdict, "found": first["error"]}
    assert row.verdict in (ACCEPTED, NORMS)
    return result | compared(model, example, reference, "accepted")


def compared(model: nn.Module, example: Any, reference: dict, found: str) -> dict[str, Any]:
    """Compare an accepted model with the reference."""
    differences = difference(measured(copy.deepcopy(model), example), reference)
    worst = max(differences.values())
    return {
        "difference": worst,
        "differences": differences,
        "verdict": RIGHT if worst <= TOLERANCE else SILENTLY_WRONG,
        "found": found,
    }


def refused(first: dict, model: nn.Module, stock: nn.Module, example: Any, change: str) -> dict[str, Any]:
    """Judge a row that must be refused: an error of the package, and an unchanged model."""
    if first["kind"] == "accepted":
        return {"verdict": SILENTLY_WRONG, "found": "accepted"}
    if first["kind"] == "raw error":
        return {"verdict": WRONG, "found": first["error"]}
    if not change:
        differences = difference(measured(copy.deepcopy(model), example), measured(copy.deepcopy(stock), example))
        if max(differences.values()) != 0.0:
            change = f"outputs: {differences}"
    if change:
        return {"verdict": WRONG, "found": f"refused, but the model was changed ({change}): {first['error']}"}
    return {"verdict": RIGHT, "found": "refused: " + first["error"].split(": ", 1)[1]}
