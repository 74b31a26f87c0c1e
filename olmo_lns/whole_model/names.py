"""Names of modules, and the calls of ``apply`` that messages advise, written with these names."""

from __future__ import annotations

from torch import nn

from olmo_lns.whole_model.trace import Trace


def is_inside(name: str, outer: str) -> bool:
    """Return true if the module ``name`` is inside of the module ``outer``. The model itself has the name ``""``."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def norms_example(model: nn.Module, trace: Trace) -> str:
    """Return the call of ``apply`` with ``norms=``, written out with this model's names where they have a pattern."""
    names = {module: name for name, module in model.named_modules()}
    places: dict[str, dict[str, list[str]]] = {}  # list -> path in the element -> keys of the elements
    for module in trace.runs:
        if not trace.is_norm(module) or trace.runs[module] != 1 or module not in names:
            continue
        parts = names[module].split(".")
        for i in (i for i, part in enumerate(parts) if part.isdigit()):
            in_element = places.setdefault(".".join(parts[:i]), {})
            in_element.setdefault(".".join(parts[i + 1 :]), []).append(parts[i])
            break
    pairs = {at: rest for at, rest in places.items() if len(rest) == 2 and len({len(k) for k in rest.values()}) == 1}
    if len(pairs) == 1:
        ((at, paths),) = pairs.items()
        pair = ", ".join(expression("block", path) for path in paths)
        return f"olmo_lns.apply(model, norms=[({pair}) for block in {expression('model', at)}])"
    return "olmo_lns.apply(model, norms=[(block.norm1, block.norm2) for block in model.layers])"


def expression(variable: str, path: str) -> str:
    """Return the Python expression of a path: ``block[1].net[0]`` for ``1.net.0``."""
    return variable + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)
