"""What the values of a study's description may be: people write it by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable, Mapping

from olmo_lns.errors import LNSConfigError

__all__ = ["KEYS", "check"]

#: What OLMo and Megatron take as a seed.
_SEEDS = 2**32


def check(raw: Mapping[str, Any], path: Path) -> None:
    """Compare each value with what its key is for; of the names in them nothing is known here.

    :raises LNSConfigError: unknown keys, or the value and what is expected.
    """
    _plain(raw, str(path))
    _compare(raw, KEYS, f"{path}: ")
    _compare(raw.get("launch", {}), LAUNCH, f"{path}: launch: ")


def _plain(value: Any, where: str) -> None:
    """Generated shell scripts hold text of a description: a line of it must not become a line of theirs."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _plain(key, where)
            _plain(inner, f"{where}: {key}")
    elif isinstance(value, list):
        for inner in value:
            _plain(inner, where)
    elif isinstance(value, str) and not value.isprintable():
        raise LNSConfigError(f"{where}: {value!r}: expected text without line breaks and control characters")


def _compare(values: Mapping[str, Any], keys: Mapping[str, tuple[Callable[[Any], bool], str]], where: str) -> None:
    if unknown := sorted(map(str, set(values) - set(keys))):
        raise LNSConfigError(f"{where}unknown keys {', '.join(unknown)}; known: {', '.join(sorted(keys))}")
    for key, value in values.items():
        fits, expected = keys[key]
        if not fits(value):
            raise LNSConfigError(f"{where}{key} {value!r}: expected {expected}")


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _identifier(value: Any) -> bool:
    return _text(value) and re.fullmatch(r"[\w.+-]+", value, re.ASCII) is not None


def _sbatch(value: Any) -> bool:
    kinds = (str, int, float, bool, type(None))
    return isinstance(value, dict) and all(
        _identifier(key) and not key.startswith("-") and isinstance(item, kinds) for key, item in value.items()
    )


def _text_or_none(value: Any) -> bool:
    return value is None or _text(value)


def _name(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    """YAML takes 1e-2 for text."""
    try:
        return _name(value) and float(value) == float(value)
    except ValueError:
        return False


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_name, value))


def _seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _SEEDS


def _seeds(value: Any) -> bool:
    return isinstance(value, list) and all(map(_seed, value))


def _rates(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_number(rate) and float(rate) > 0 for rate in value)


def _of(inner: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A mapping from names to what ``inner`` takes."""
    return lambda value: isinstance(value, dict) and all(_name(name) and inner(item) for name, item in value.items())


def _either(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(kind(value) for kind in kinds)


def _path_pattern(value: Any) -> bool:
    try:
        return _text(value) and bool(value.format(size="", arm=""))
    except (KeyError, IndexError, ValueError, AttributeError):
        return False


_SETTINGS = _of(lambda value: value is None or isinstance(value, dict))
_TABLE = (_either(_names, _SETTINGS), "a list of names, or for each name its settings")
_ONE_TO = f"a list of whole numbers from 0 to {_SEEDS - 1}"

#: Key -> whether a value will do, and what is expected.
KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_identifier, "letters, digits, '.', '_', '+' and '-' (it names Slurm's jobs)"),
    "framework": (_text, "the name of a framework"),
    "config": (_path_pattern, "a path, with {size} and {arm} where they belong and no other braces"),
    "data": (_text_or_none, "a name or nothing"),
    "sizes": _TABLE,
    "arms": _TABLE,
    "seeds": (_seeds, _ONE_TO),
    "more_seeds": (_of(_either(_seeds, _of(_seeds))), f"for a size, or a size's arms, {_ONE_TO}"),
    "rates": (
        _either(_rates, _of(_either(_rates, _of(_rates)))),
        "a list of learning rates above 0, or one for each arm, or for each size",
    ),
    "only": (_of(_names), "for a size a list of arms"),
    "final_fraction": (_number, "a number in (0, 1]"),
    "horizons": (lambda value: isinstance(value, list) and all(map(_count, value)), "rising numbers of steps"),
    "decay": (_number, "a share of the steps between 0 and 1"),
    "finished": (_text_or_none, "the path of a table"),
    "published": (_text_or_none, "the name of a published table"),
    "launch": (_of(lambda _: True), "a mapping of settings"),
}
LAUNCH: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (_text, "`train` or the path of a script"),
    "nproc": (_count, "a number of processes"),
    "nodes": (_either(_count, _of(_count)), "a number of nodes, or for a size its own"),
    "workers": (_count, "a number of runs"),
    "threads": (_either(_count, lambda value: value is None), "a number of threads"),
    "args": (_names, "a list of arguments"),
    "sbatch": (_sbatch, "a mapping of #SBATCH options, such as qos, to text, numbers, true, false or null"),
}
