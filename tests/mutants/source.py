"""Change an upstream function: by another text, by its syntax tree, or by a function around it.

What is made has a source file, so that whoever reads the source of upstream reads the changed one.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import sys
import tempfile
import textwrap
from pathlib import Path

CO_FUTURE_ANNOTATIONS = 0x1000000
_FOLDER = Path(tempfile.gettempdir()) / f"upstream-mutants-{hashlib.sha1(sys.prefix.encode()).hexdigest()[:8]}"


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
    """Replace text in the source of a function; a text that is not there is an error."""

    def change(text):
        for old, new in pairs:
            if old not in text:
                raise LookupError(f"{path}: no {old!r}")
            text = text.replace(old, new)
        return text

    rewrite(path, change)


def rewrite(path, change):
    """Compile ``change(source)`` in the place of a function, with its globals, its class cell and mangled names."""
    owner, name, function = locate(path)
    text = change(textwrap.dedent(inspect.getsource(function)))
    innermost = inspect.unwrap(function)
    annotations = innermost.__annotations__.values()  # may name a class that is defined in the owner
    inner = any(each is vars(owner).get(getattr(each, "__name__", "")) for each in annotations)
    is_text = inner or innermost.__code__.co_flags & CO_FUTURE_ANNOTATIONS
    future = "from __future__ import annotations\n" if is_text else ""
    if inspect.isclass(owner):
        text = f"class {owner.__name__}:\n" + textwrap.indent(text, "    ")
    _FOLDER.mkdir(exist_ok=True)
    file = _FOLDER / f"{hashlib.sha1((path + text).encode()).hexdigest()}.py"
    file.write_text(future + text)
    space = {}
    exec(compile(future + text, str(file), "exec", dont_inherit=True), innermost.__globals__, space)
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


def _first(tree):
    return next(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def edited(text):
    """A logging line, a new keyword, a local variable under another name where there is one, and a comment."""
    tree = ast.parse(text)
    function = _first(tree)
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    stored = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    imported = {
        a.asname or a.name for n in ast.walk(function) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names
    }
    own = [name for name in stored if name not in arguments | imported]
    for node in ast.walk(function):
        if own and isinstance(node, ast.Name) and node.id == own[0]:
            node.id = f"{own[0]}_renamed"
    function.body.insert(0, ast.parse("__import__('logging').getLogger('upstream').debug('called')").body[0])
    function.args.kwonlyargs.append(ast.arg("since_last_week"))
    function.args.kw_defaults.append(ast.Constant(None))
    return ast.unparse(ast.fix_missing_locations(tree)) + "  # Said by upstream since last week.\n"


def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call
