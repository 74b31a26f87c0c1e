"""What the values of a study's description may be: people write it by hand. docs/study.md has every key."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any, Callable, Mapping

import yaml

from olmo_lns.errors import LNSConfigError, did_you_mean

__all__ = ["KEYS", "LAUNCH", "check", "published"]

Fits = Callable[[Any], bool]
#: Of a key that must be there.
NEEDED = ...


@cache
def published() -> dict[str, Any]:
    """The papers' numbers: ``tables``, ``points`` and ``batches`` of published.yaml."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return found


def check(raw: Mapping[str, Any], path: Path) -> None:
    """Compare each value with what its key is for; of sizes, arms and frameworks nothing is known here.

    :raises LNSConfigError: a key that is missing or unknown, or the value and what is expected.
    """
    if lacking := sorted(key for key, (*_, default) in KEYS.items() if default is NEEDED and key not in raw):
        raise LNSConfigError(f"{path}: a study description needs {', '.join(lacking)}")
    _printable(raw, str(path))
    _compare(raw, KEYS, f"{path}: ")
    _compare(raw.get("launch", {}), LAUNCH, f"{path}: launch: ")
    if (name := raw.get("published")) is not None and name not in (tables := published()["tables"]):
        raise LNSConfigError(
            f"{path}: published {name!r}{did_you_mean(name, tables)}: expected one of {', '.join(tables)}"
        )


def _printable(value: Any, where: str) -> None:
    """Generated shell scripts hold text of a description: a line of it must not become a line of theirs."""
    if isinstance(value, str) and not value.isprintable():
        raise LNSConfigError(f"{where}: {value!r}: expected text without line breaks and control characters")
    if isinstance(value, dict):
        for key, inner in value.items():
            _printable(key, where)
            _printable(inner, f"{where}: {key}")
    elif isinstance(value, list):
        for inner in value:
            _printable(inner, where)


def _compare(values: Mapping[str, Any], keys: Mapping[str, tuple[Fits, str, Any]], where: str) -> None:
    if unknown := sorted(map(str, set(values) - set(keys))):
        raise LNSConfigError(f"{where}unknown keys {', '.join(unknown)}; known: {', '.join(sorted(keys))}")
    for key, value in values.items():
        fits, expected, _ = keys[key]
        if not fits(value):
            raise LNSConfigError(f"{where}{key} {value!r}: expected {expected}")


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _identifier(value: Any) -> bool:
    return _text(value) and re.fullmatch(r"[\w.+][\w.+-]*", value, re.ASCII) is not None


def _name(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _between(low: float, high: float) -> Fits:
    """A number above ``low`` and no larger than ``high``; YAML takes 1e-2 for text."""

    def fits(value: Any) -> bool:
        try:
            return _name(value) and low < float(value) <= high
        except ValueError:
            return False

    return fits


def _rate(value: Any) -> bool:
    """A number, or a multiple of the config's: ``2x``."""
    return _between(0, 1e300)(value[:-1] if isinstance(value, str) and value.endswith("x") else value)


def _whole(smallest: int, largest: float = math.inf) -> Fits:
    return lambda value: type(value) is int and smallest <= value < largest


def _list(inner: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(inner, value))


def _of(inner: Fits, name: Fits = _name) -> Fits:
    """A mapping from names to what ``inner`` takes."""
    return lambda value: isinstance(value, dict) and all(name(key) and inner(item) for key, item in value.items())


def _or(*kinds: Fits) -> Fits:
    return lambda value: any(kind(value) for kind in kinds)


def _path_pattern(value: Any) -> bool:
    try:
        return _text(value) and bool(value.format(size="", arm=""))
    except (KeyError, IndexError, ValueError, AttributeError):
        return False


def _rates(value: Any) -> bool:
    return bool(value) and _list(_rate)(value)


def _optional(inner: Fits) -> Fits:
    return lambda value: value is None or inner(value)


_TABLE = (_or(_list(_name), _of(_optional(_of(lambda _: True)))), "a list of names, or for each name its settings")
#: What OLMo and Megatron take as a seed.
_SEEDS, _ONE_TO = _list(_whole(0, 2**32)), f"a list of whole numbers from 0 to {2**32 - 1}"

#: Key -> whether a value will do, what is expected, and the default; None where there is none or the framework has one.
KEYS: dict[str, tuple[Fits, str, Any]] = {
    "name": (_identifier, "letters, digits, '.', '_', '+' and '-' (it names Slurm's jobs)", NEEDED),
    "framework": (_text, "the name of a framework", "olmo"),
    "config": (_path_pattern, "a path, with {size} and {arm} where they belong and no other braces", NEEDED),
    "sizes": (*_TABLE, NEEDED),
    "arms": (*_TABLE, NEEDED),
    "rates": (
        _or(_rates, _of(_or(_rates, _of(_rates)))),
        "a list of learning rates above 0, or of multiples such as 2x, or one for each arm, or for each size",
        None,
    ),
    "seeds": (_SEEDS, _ONE_TO, None),
    "more_seeds": (_of(_or(_SEEDS, _of(_SEEDS))), f"for a size, or a size's arms, {_ONE_TO}", None),
    "only": (_of(_list(_name)), "for a size a list of arms", None),
    "data": (_optional(_text), "a name or nothing", None),
    "final_fraction": (_between(0, 1), "a number in (0, 1]", 0.01),
    "horizons": (_list(_whole(1)), "rising numbers of steps", None),
    "decay": (_between(0, 1 - 1e-9), "a share of the steps between 0 and 1", 0.1),
    "finished": (_optional(_text), "the path of a table", None),
    "published": (_optional(_text), "the name of a published table", None),
    "launch": (_of(lambda _: True), "a mapping of settings", None),
}
LAUNCH: dict[str, tuple[Fits, str, Any]] = {
    "command": (_text, "`train` or the path of a script", "train"),
    "nproc": (_whole(1), "a number of processes", 1),
    "nodes": (_or(_whole(1), _of(_whole(1))), "a number of nodes, or for a size its own", 1),
    "workers": (_whole(1), "a number of runs", 1),
    "threads": (_optional(_whole(1)), "a number of threads", None),
    "args": (_list(_name), "a list of arguments", None),
    "sbatch": (
        _of(lambda value: not isinstance(value, (list, dict)), _identifier),
        "a mapping of #SBATCH options, such as qos, to text, numbers, true, false or null",
        None,
    ),
}
