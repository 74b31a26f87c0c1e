"""Change an upstream function: by another text, or by a function around it."""

import importlib
import inspect
import textwrap

CO_FUTURE_ANNOTATIONS = 0x1000000


def locate(path):
    """Owner, name and the plain function of ``package.module:Class.method``."""
    module, _, qualname = path.partition(":")
    owner = importlib.import_module(module)
    *parents, name = qualname.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    found = inspect.getattr_static(owner, name)
    return owner, name, getattr(found, "__func__", found)


def edit(path, *pairs):
    """Compile a function's source with replaced text, in its globals and class; a text that is not there is an error."""
    owner, name, function = locate(path)
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in pairs:
        if old not in text:
            raise LookupError(f"{path}: no {old!r}")
        text = text.replace(old, new)
    innermost = inspect.unwrap(function)
    if inspect.isclass(owner):
        text = f"class {owner.__name__}:\n" + textwrap.indent(text, "    ")
    if innermost.__code__.co_flags & CO_FUTURE_ANNOTATIONS:
        text = "from __future__ import annotations\n" + text
    space = {}
    exec(compile(text, f"<{path}, changed>", "exec", dont_inherit=True), innermost.__globals__, space)
    new = space[name] if not inspect.isclass(owner) else vars(space[owner.__name__])[name]
    plain = inspect.unwrap(getattr(new, "__func__", new))
    for cell_name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        if cell_name == "__class__":
            cell.cell_contents = owner
    plain.__module__, plain.__qualname__ = function.__module__, function.__qualname__
    setattr(owner, name, new)


def around(path, make):
    """Put ``make(function)`` in the place of a function."""
    owner, name, function = locate(path)
    new = make(function)
    found = inspect.getattr_static(owner, name)
    setattr(owner, name, new if inspect.isfunction(found) else type(found)(new))
