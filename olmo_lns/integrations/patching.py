"""Replace one function of an upstream, and only one that was verified.

Every function that this package replaces is listed with the fingerprints of the sources that were read and tested. A
wrapper around an unknown function can give a model that trains and is wrong, so nothing else is replaced. Where no
scheme is selected that costs a warning (:func:`replace_all` with a framework); else :func:`require_verified` raises.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import logging
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from olmo_lns.environment import ALLOW_UNVERIFIED, DISABLE, is_set
from olmo_lns.errors import UpstreamChangedError

log = logging.getLogger(__name__)

#: Attribute set on every function that this package puts in an upstream's place.
MARKER = "__olmo_lns_patched__"

#: Framework -> why it was left untouched.
_aside: dict[str, UpstreamChangedError] = {}


@dataclass(frozen=True)
class Target:
    """One upstream function or method.

    :param path: ``"package.module:Class.method"`` or ``"package.module:function"``.
    :param verified: fingerprint -> the upstream versions whose source has it.
    """

    path: str
    verified: Mapping[str, str]

    def locate(self) -> tuple[Any, str, Any]:
        """The object that holds the symbol, the symbol's name there, and what it is (a classmethod as such).

        :raises UpstreamChangedError: the module, class or function does not exist.
        """
        module_name, _, qualname = self.path.partition(":")
        *parents, name = qualname.split(".")
        versions = "; ".join(dict.fromkeys(self.verified.values()))
        try:
            owner: Any = importlib.import_module(module_name)
            for parent in parents:
                owner = getattr(owner, parent)
            return owner, name, inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise UpstreamChangedError(
                f"{self.path} does not exist ({error}); it was verified in {versions or 'no version'}. This upstream "
                f"version has moved or renamed it: install a verified version or a newer olmo-lns, or set {DISABLE}=1."
            ) from error


def exists(target: Target) -> bool:
    """Whether this upstream has the symbol, verified or not."""
    with contextlib.suppress(UpstreamChangedError):
        return bool(target.locate())
    return False


def fingerprint(function: Callable[..., Any]) -> str:
    """16 hex digits that identify the source of ``function`` (SHA-256; indentation ignored).

    :raises UpstreamChangedError: the source cannot be read (compiled or generated code).
    """
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError) as error:
        raise UpstreamChangedError(f"cannot read the source of {function!r}: {error}") from error
    return digest(source)


def digest(source: str) -> str:
    """16 hex digits that identify a function's source (SHA-256; indentation and empty lines ignored)."""
    lines = (line.rstrip() for line in textwrap.dedent(source).splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def source_below(tree: Path, path: str) -> str | None:
    """The source of ``package.module:Class.method`` below ``tree``, or None where it is not defined."""
    module, _, qualname = path.partition(":")
    place = tree.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in qualname.split("."):
        found = [n for n in getattr(node, "body", []) if getattr(n, "name", None) == name]
        if not found:
            return None
        node = found[0]
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def unverified(tree: Path, targets: Sequence[Target], *, all_needed: bool) -> list[str]:
    """The paths of those ``targets`` whose source below ``tree`` is none of those verified.

    :param all_needed: a symbol that is not there counts too (else it belongs to another version).
    """
    found = []
    for target in targets:
        source = source_below(tree, target.path)
        if all_needed if source is None else digest(source) not in target.verified:
            found.append(target.path)
    return found


def is_patched(function: Any) -> bool:
    """Whether ``function`` (or the function of a classmethod) is a replacement of ours."""
    return bool(getattr(getattr(function, "__func__", function), MARKER, False))


def replace(
    target: Target, make: Callable[[Callable[..., Any]], Callable[..., Any]], *, only_look: bool = False
) -> bool:
    """Replace ``target`` by ``make(function)``, which keeps name, docstring and ``__wrapped__``.

    ``make`` gets the plain function (out of its classmethod or staticmethod) and returns one of the same signature.

    :param only_look: ``make`` hands all arguments and the result on as they are: the source need not be known.
    :returns: whether it was replaced; False, and nothing done, when it was replaced before.
    :raises UpstreamChangedError: it is missing, or its source is not one that was verified.
    """
    owner, name, original = target.locate() if only_look else check_target(target)
    if is_patched(original):
        return False
    wrapper_type = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    function = original.__func__ if wrapper_type else original
    replacement = functools.wraps(function)(make(function))
    setattr(replacement, MARKER, True)
    setattr(owner, name, wrapper_type(replacement) if wrapper_type else replacement)
    log.debug("replaced %s", target.path)
    return True


def replace_all(
    pairs: Sequence[tuple[Target, Callable[[Callable[..., Any]], Callable[..., Any]]]], *, framework: str = ""
) -> bool:
    """:func:`replace` each pair once all of them are verified; otherwise upstream stays as it is.

    :param framework: its name, where nothing is selected yet: it is set aside with a warning if it is not verified.
    :returns: whether they were replaced.
    :raises UpstreamChangedError: one is not verified and no framework was named.

    Example: ``replace_all(pairs, framework="OLMo")`` on import, ``require_verified("OLMo")`` where one is asked for.
    """
    try:
        for target, _ in pairs:
            check_target(target)
    except UpstreamChangedError as error:
        if not framework:
            raise
        set_aside(framework, error)
        return False
    for target, make in pairs:
        replace(target, make)
    return True


def set_aside(framework: str, error: UpstreamChangedError) -> None:
    """Leave ``framework`` as it is, with one warning in a process."""
    if framework not in _aside:
        _aside[framework] = error
        log.warning("olmo-lns leaves this %s untouched, and no scheme can be selected: %s", framework, error)


def require_verified(*frameworks: str) -> None:
    """:raises UpstreamChangedError: one of ``frameworks`` was set aside, and now a scheme is asked of it."""
    for framework in frameworks:
        if framework in _aside:
            words = f"A scheme was asked for, but this {framework} was left untouched"
            raise UpstreamChangedError(f"{words}: {_aside[framework]}")


def check_target(target: Target) -> tuple[Any, str, Any]:
    """What :meth:`Target.locate` returns, once it is verified (a replacement of ours was verified before).

    :raises UpstreamChangedError: it is missing, or its source is not one that was verified.
    """
    owner, name, original = target.locate()
    if not is_patched(original):
        verify(target, getattr(original, "__func__", original))
    return owner, name, original


def verify(target: Target, function: Callable[..., Any]) -> None:
    """:raises UpstreamChangedError: ``function`` is not a verified version of ``target``."""
    found = fingerprint(function)
    if found in target.verified:
        return
    message = (
        f"{target.path} in {inspect.getsourcefile(inspect.unwrap(function))} has fingerprint {found}, which is "
        f"none of those verified ({', '.join(f'{k}: {v}' for k, v in target.verified.items())})."
    )
    if is_set(ALLOW_UNVERIFIED):
        log.warning("%s Going on because %s=1.", message, ALLOW_UNVERIFIED)
        return
    raise UpstreamChangedError(
        f"{message} Install a verified version, set {ALLOW_UNVERIFIED}=1 to go on with code nobody has checked, or "
        f"{DISABLE}=1 to start without olmo-lns."
    )
