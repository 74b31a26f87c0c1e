"""Run cases of a stock program, and write down everything that each one did, to compare two processes.

A program has a dictionary of cases (name -> function without arguments) and calls :func:`main` with it. A case is
observed from outside: its result, its error, its warnings, what it printed and logged, and every file that was opened
and every folder that was listed while it ran.
"""

import argparse
import contextlib
import dataclasses
import enum
import hashlib
import io
import json
import logging
import os
import re
import sys
import traceback
import types
import warnings
from pathlib import Path

import torch

from support import forked

#: Options that this package adds to Megatron's arguments, the only difference that is allowed.
_OURS = ("layernorm_scaling", "no_scaled_init")
#: What a run prints about the clock.
_TIME = re.compile(
    r"[0-9.]+ ?(s|ms|seconds)\b|'(train_runtime|train_\w+_per_second|step_time)': '[0-9.e-]+'|\[[0-9-]{10} [0-9:,]+\]"
)
_EVENTS = ("open", "os.listdir", "os.scandir")
_CODE = (".py", ".pyc", ".so")
_opened: list[str] | None = None


def _audit(event, arguments):
    if _opened is None or event not in _EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    path = os.fsdecode(arguments[0])
    # The import system opens modules and lists their folders.
    path = re.sub(r"\.pyc\.\d+$", ".pyc", path)  # while it is written
    path = re.sub(r"default-[0-9a-f]{16}", "default-<data>", path)  # the cache of datasets, by the path of the data
    is_code = path.endswith(_CODE) if event == "open" else path in sys.path or os.path.exists(f"{path}/__init__.py")
    if not is_code and not path.startswith(("/proc", "/dev")):
        _opened.append(f"{event} {path}")


sys.addaudithook(_audit)


def plain(value):
    """``value`` as JSON: tensors and modules by the digest of their elements, objects by their fields."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value if not isinstance(value, float) or value == value else "nan"
    if isinstance(value, torch.Tensor) and value.is_meta:
        return f"meta {value.dtype} {tuple(value.shape)}"
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]}"
    if isinstance(value, torch.nn.Module):
        return [type(value).__name__, type(value).__mro__[1].__name__, plain(dict(value.state_dict())), value.training]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, argparse.Namespace):
        fields = {name: each for name, each in vars(value).items() if not name.startswith(_OURS)}
        return {name: plain(each) for name, each in sorted(fields.items())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {name: plain(each) for name, each in sorted(vars(value).items())}
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return (
        f"{type(value).__name__} {value}" if isinstance(value, (enum.Enum, Path, torch.dtype)) else type(value).__name__
    )


class _Log(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def observed(case):
    """Run ``case``; return all that can be seen of it."""
    global _opened
    result, error, log, printed = None, "", _Log(), io.StringIO()
    torch.manual_seed(0)
    logging.getLogger().addHandler(log)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        opened = _opened = []
        try:
            result = case()
        except BaseException as raised:  # torch has errors that are no Exception
            error = "".join(traceback.format_exception_only(raised))
        finally:
            _opened = None
    logging.getLogger().removeHandler(log)
    text = _TIME.sub("<time>", printed.getvalue())
    return {
        "result": plain(result),
        "error": error,
        "warnings": sorted({f"{each.category.__name__}: {each.message}" for each in caught}),
        "printed": [line for line in text.splitlines() if not line.strip().startswith(_OURS)],
        "logged": log.lines,
        "opened": sorted({re.sub(r"__0_[0-9].distcp", "__0.distcp", each) for each in opened}),
        "random": plain(torch.get_rng_state()),
    }


def path_of(function):
    """``package.module:Class.method``; a wrapper has the names of what it wraps."""
    return f"{function.__module__}:{function.__qualname__}"


def wrappers(frameworks):
    """Path -> function, for every function in the loaded modules of the frameworks that this package has replaced."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in frameworks or not isinstance(module, types.ModuleType):
            continue
        values = list(vars(module).values())
        own = [each for each in values if isinstance(each, type) and each.__module__ == name]
        for each in (*values, *(member for owner in own for member in vars(owner).values())):
            function = getattr(each, "__func__", each) if not isinstance(each, type) else each
            if isinstance(function, types.FunctionType) and "__olmo_lns_wrapped__" in vars(function):
                found[path_of(function)] = function
    return dict(sorted(found.items()))


def renamed_parameters(function):
    """The parameters of a wrapper that the wrapped function has under another name, which a keyword could not reach."""
    names, stock = (f.__code__.co_varnames[: f.__code__.co_argcount] for f in (function, function.__wrapped__))
    return [ours for ours, theirs in zip(names, stock, strict=False) if ours != theirs]


def unloaded_modules(frameworks):
    """The modules of the frameworks in which this package would wrap something, that exist and were not imported."""
    hook = sys.modules.get("olmo_lns.hook")
    names = [name for name in getattr(hook, "_callbacks", ()) if name.partition(".")[0] in frameworks]
    return [name for name in names if name not in sys.modules and hook._exists(name)]


def main(cases, functions, folder, *frameworks):
    """Observe all cases; write them to ``observed.json`` in ``folder``.

    :param cases: ``"function: input"`` -> what runs it. :param functions: name -> the function, where it may be wrapped.
    :param frameworks: the top-level packages whose wrapped functions must all have a case.
    """
    done = {name: observed(case) for name, case in cases.items()}
    values = {
        "cases": done,
        "paths": {name: path_of(function) for name, function in functions.items()},
        "wrapped": list(found := wrappers(frameworks)),
        "renamed": {path: names for path, each in found.items() if (names := renamed_parameters(each))},
        "unloaded": unloaded_modules(frameworks),
        "package": "olmo_lns" in sys.modules,
    }
    # Addresses in the text of an error differ, and so does the folder. Threads choose a sharded checkpoint's files.
    text = re.sub(r"0x[0-9a-f]{6,}", "<address>", json.dumps(values))
    text = re.sub(r"__0_\d\.distcp", "__0.distcp", text)
    (folder / "observed.json").write_text(
        re.sub(f"{re.escape(str(folder.parent))}/(installed|stock)", "<folder>", text)
    )


def compare(installed, stock, *, also_opened="", elsewhere="", added=""):
    """Compare what :func:`main` wrote in the folder of a process with this package and of one without.

    No case differs, and every function that this package has wrapped has a case.

    :param also_opened: pattern of the files that this package opens by design, such as a checkpoint's own config.
    :param elsewhere: pattern of the modules whose functions another program runs.
    :param added: pattern of what this package adds to the list of names in an error.
    """
    ours, theirs = (json.loads((folder / "observed.json").read_text()) for folder in (installed, stock))
    assert not theirs["package"] and theirs["wrapped"] == [] and ours["package"]
    assert not ours["renamed"] and list(ours["cases"]) == list(theirs["cases"])
    differing = []
    for name, expected in theirs["cases"].items():
        found = ours["cases"][name]
        for each in (found, expected) if also_opened else ():
            each["opened"] = [line for line in each["opened"] if not re.search(also_opened, line)]
        found["error"] = re.sub(added, "", found["error"]) if added else found["error"]
        differing += [
            f"{name}: {key}: {found[key]} for {expected[key]}" for key in expected if found[key] != expected[key]
        ]
    assert not differing, "\n".join(differing)
    names = {name.partition(":")[0] for name in ours["cases"]}
    run = {path for name, path in ours["paths"].items() if name in names}
    mine = [path for path in (*ours["wrapped"], *ours["unloaded"]) if not (elsewhere and re.match(elsewhere, path))]
    assert sorted(run) == sorted(mine), "a wrapped function has no case, or a function with cases is not wrapped"


def run_both(program, tmp_path, **options):
    """Run ``program`` (a path) in a process with this package and in one without, and compare. Options: see compare."""
    code = f"import runpy, sys; sys.argv[0] = {str(program)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    without = "from support.start_up import remove_start_up_hook as remove; remove()"
    folders = {"installed": "", "stock": without}
    for name, first in folders.items():
        (tmp_path / name).mkdir()
        done = forked.run(f"{first}\n{code}", tmp_path / name, path=Path(__file__).parents[1], cwd=tmp_path / name)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    compare(*(tmp_path / name for name in folders), **options)
