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

#: What OLMo and Megatron take as a seed.
_SEEDS = 2**32
Fits = Callable[[Any], bool]


@cache
def published() -> dict[str, Any]:
    """The papers' numbers: ``tables``, ``points`` and ``batches`` of published.yaml."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return found


def check(raw: Mapping[str, Any], path: Path) -> None:
    """Compare each value with what its key is for; of sizes, arms and frameworks nothing is known here.

    :raises LNSConfigError: unknown keys, or the value and what is expected.
    """
    _printable(raw, str(path))
    _compare(raw, KEYS, f"{path}: ")
    _compare(raw.get("launch", {}), LAUNCH, f"{path}: launch: ")
    if (name := raw.get("published")) is not None and name not in (tables := published()["tables"]):
        raise LNSConfigError(
            f"{path}: published {name!r}{did_you_mean(name, tables)}: expected one of {', '.join(tables)}"
        )


def _printable(value: Any, where: str) -> None:
    """Generated shell scripts hold text of a description: a line of it must not become a line of theirs."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        inside = f"{where}: {key}" if isinstance(value, dict) else where
        for text in (key, inner):
            if isinstance(text, str) and not text.isprintable():
                raise LNSConfigError(f"{inside}: {text!r}: expected text without line breaks and control characters")
        if isinstance(inner, (dict, list)):
            _printable(inner, inside)


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
    return _text(value) and re.fullmatch(r"[\w.+-]+", value, re.ASCII) is not None


def _name(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    """YAML takes 1e-2 for text."""
    try:
        return _name(value) and float(value) == float(value)
    except ValueError:
        return False


def _rate(value: Any) -> bool:
    """A number, or a multiple of the config's: ``2x``."""
    number = value[:-1] if isinstance(value, str) and value.endswith("x") else value
    return _number(number) and 0 < float(number) < math.inf


def _rates(value: Any) -> bool:
    return _list(_rate)(value) and bool(value)


def _whole(smallest: int, largest: float = float("inf")) -> Fits:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and smallest <= value < largest


def _list(inner: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(inner, value))


def _of(inner: Fits) -> Fits:
    """A mapping from names to what ``inner`` takes."""
    return lambda value: isinstance(value, dict) and all(_name(name) and inner(item) for name, item in value.items())


def _either(*kinds: Fits) -> Fits:
    return lambda value: any(kind(value) for kind in kinds)


def _none(value: Any) -> bool:
    return value is None


def _path_pattern(value: Any) -> bool:
    try:
        return _text(value) and bool(value.format(size="", arm=""))
    except (KeyError, IndexError, ValueError, AttributeError):
        return False


def _sbatch(value: Any) -> bool:
    kinds = (str, int, float, bool, type(None))
    return isinstance(value, dict) and all(
        _identifier(key) and not key.startswith("-") and isinstance(item, kinds) for key, item in value.items()
    )


_SETTINGS = _of(_either(_none, _of(lambda _: True)))
_TABLE = (_either(_list(_name), _SETTINGS), "a list of names, or for each name its settings")
_SEED_LIST, _ONE_TO = _list(_whole(0, _SEEDS)), f"a list of whole numbers from 0 to {_SEEDS - 1}"
#: Of a key that must be there.
NEEDED = ...

#: Key -> whether a value will do, what is expected, and the default; None where there is none or the framework has one.
KEYS: dict[str, tuple[Fits, str, Any]] = {
    "name": (_identifier, "letters, digits, '.', '_', '+' and '-' (it names Slurm's jobs)", NEEDED),
    "framework": (_text, "the name of a framework", "olmo"),
    "config": (_path_pattern, "a path, with {size} and {arm} where they belong and no other braces", NEEDED),
    "sizes": (*_TABLE, NEEDED),
    "arms": (*_TABLE, NEEDED),
    "rates": (
        _either(_rates, _of(_either(_rates, _of(_rates)))),
        "a list of learning rates above 0, or of multiples such as 2x, or one for each arm, or for each size",
        None,
    ),
    "seeds": (_SEED_LIST, _ONE_TO, None),
    "more_seeds": (_of(_either(_SEED_LIST, _of(_SEED_LIST))), f"for a size, or a size's arms, {_ONE_TO}", None),
    "only": (_of(_list(_name)), "for a size a list of arms", None),
    "data": (_either(_none, _text), "a name or nothing", None),
    "final_fraction": (lambda v: _number(v) and 0 < float(v) <= 1, "a number in (0, 1]", 0.01),
    "horizons": (_list(_whole(1)), "rising numbers of steps", None),
    "decay": (lambda v: _number(v) and 0 < float(v) < 1, "a share of the steps between 0 and 1", 0.1),
    "finished": (_either(_none, _text), "the path of a table", None),
    "published": (_either(_none, _text), "the name of a published table", None),
    "launch": (_of(lambda _: True), "a mapping of settings", None),
}
LAUNCH: dict[str, tuple[Fits, str, Any]] = {
    "command": (_text, "`train` or the path of a script", "train"),
    "nproc": (_whole(1), "a number of processes", 1),
    "nodes": (_either(_whole(1), _of(_whole(1))), "a number of nodes, or for a size its own", 1),
    "workers": (_whole(1), "a number of runs", 1),
    "threads": (_either(_none, _whole(1)), "a number of threads", None),
    "args": (_list(_name), "a list of arguments", None),
    "sbatch": (_sbatch, "a mapping of #SBATCH options, such as qos, to text, numbers, true, false or null", None),
}
