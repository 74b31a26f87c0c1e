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
import warnings
from pathlib import Path

import torch

#: Options that this package adds to Megatron's arguments, the only difference that is allowed.
_OURS = ("layernorm_scaling", "no_scaled_init")
_EVENTS = ("open", "os.listdir", "os.scandir")
_CODE = (".py", ".pyc", ".so")
_opened: list[str] | None = None


def _audit(event, arguments):
    if _opened is None or event not in _EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    path = os.fsdecode(arguments[0])
    # The import system opens modules and lists their folders.
    is_code = path.endswith(_CODE) if event == "open" else path in sys.path or os.path.exists(f"{path}/__init__.py")
    if not is_code and not path.startswith(("/proc", "/dev")):
        _opened.append(f"{event} {path}")


sys.addaudithook(_audit)


def plain(value):
    """``value`` as JSON: tensors and modules by the digest of their elements, objects by their fields."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value if not isinstance(value, float) or value == value else "nan"
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
    text = re.sub(r"[0-9.]+ ?(s|ms|seconds)\b", "<time>", printed.getvalue())
    return {
        "result": plain(result),
        "error": error,
        "warnings": sorted({f"{each.category.__name__}: {each.message}" for each in caught}),
        "printed": [line for line in text.splitlines() if not line.strip().startswith(_OURS)],
        "logged": log.lines,
        "opened": sorted({re.sub(r"__0_[0-9].distcp", "__0.distcp", each) for each in opened}),
        "random": plain(torch.get_rng_state()),
    }


def main(cases, functions, folder):
    """Observe all cases; write them to ``observed.json`` in ``folder``, with the ``functions`` that are wrapped."""
    done = {name: observed(case) for name, case in cases.items()}
    wrapped = [name for name, function in functions.items() if hasattr(function, "__olmo_lns_wrapped__")]
    # Addresses in the text of an error differ, and so does the folder. Threads choose a sharded checkpoint's files.
    text = re.sub(r"0x[0-9a-f]{6,}", "<address>", json.dumps({"cases": done, "wrapped": wrapped}))
    text = re.sub(r"__0_\d\.distcp", "__0.distcp", text)
    (folder / "observed.json").write_text(text.replace(str(folder), "<folder>"))


def compare(installed, stock):
    """Compare what :func:`main` wrote in the folder of a process with this package and of one without.

    :returns: the names of the wrapped functions. Each has a case, and no case differs.
    """
    ours, theirs = (json.loads((folder / "observed.json").read_text()) for folder in (installed, stock))
    assert theirs["wrapped"] == []
    assert set(ours["wrapped"]) == {name.partition(":")[0] for name in ours["cases"]}, "a function is not wrapped"
    for name, expected in theirs["cases"].items():
        for field, value in expected.items():
            assert ours["cases"][name][field] == value, f"{name}: {field} differs"
    assert set(ours["cases"]) == set(theirs["cases"])
    return set(ours["wrapped"])
