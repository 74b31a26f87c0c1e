"""Run programs in forks of one interpreter that has imported torch and what the frameworks import, and no framework.

A new interpreter needs seconds for these imports. The start-up hook has run in it as in any other. Where the imports or
the start of an interpreter are what is tested, start a new one. A fork runs no atexit functions.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

IMPORTS = """
torch torch.distributed.fsdp torch.distributed.checkpoint torch.distributed.tensor torch.distributions torch._dynamo
numpy omegaconf cached_path rich datasets wandb sklearn.metrics tokenizers safetensors.torch huggingface_hub boto3
google.cloud.storage scipy.signal scipy.stats matplotlib.pyplot pandas
"""
FRAMEWORKS = ("olmo", "olmo_core", "megatron", "transformers", "olmo_lns")


@functools.cache
def _server(first, start):
    """The interpreter that forks, after ``first``. :param start: changes of the environment in which it starts."""
    command = [sys.executable, "-W", "ignore", __file__, first]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", **dict(start)}  # huggingface_hub reads it when it is imported
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=offline)
    atexit.register(lambda: (process.kill(), process.wait()))
    return process


def run(code, *arguments, path=None, cwd=None, first="", start=(), **changes):
    """Run ``code`` as ``python -c`` would, in the environment of the tests with ``changes``; None removes a name.

    :param path: a folder that comes first on ``sys.path``. :param first: code that is run before the fork.
    :param start: environment variables of the interpreter that forks.
    """
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    if not sys.platform.startswith("linux"):  # a fork after these imports is not safe elsewhere
        environment |= {"PYTHONPATH": os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])} if path else {}
        environment |= dict(start)
        command = [sys.executable, "-W", "ignore", "-c", f"{first}\n{code}", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=900)
    requested = {"code": code, "argv": ["-c", *map(str, arguments)], "env": environment}
    requested |= {"path": str(path) if path else None, "cwd": str(cwd) if cwd else os.getcwd()}
    server = _server(first, tuple(dict(start).items()))
    print(json.dumps(requested), file=server.stdin, flush=True)
    returncode, stdout, stderr = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(requested["argv"], returncode, stdout, stderr)


def run_ranks(file, function, *arguments, ranks=2):
    """Run a function of a test file, such as ``train(rank, *arguments)``, in each of several forks of one fork.

    The fork imports the test file and what that needs. A rank would otherwise import it in an interpreter of its own.

    :param file: the ``__file__`` of the test. :param arguments: values with a ``repr``.
    """
    file, start_method = Path(file), "fork" if sys.platform.startswith("linux") else "spawn"
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), str(file.parent)]}\n"
        f"import torch, {file.stem} as module\n"
        f"torch.multiprocessing.start_processes(module.{function}, {arguments!r}, {ranks}, start_method={start_method!r})"
    )
    done = run(code)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _child(requested):
    os.environ.clear()
    os.environ.update(requested["env"])
    os.chdir(requested["cwd"])
    sys.argv, sys.path[0] = requested["argv"], ""
    sys.path[:0] = [requested["path"]] if requested["path"] else []
    main = sys.modules["__main__"] = type(sys)("__main__")
    main.__builtins__ = __builtins__
    try:
        exec(compile(requested["code"], "<string>", "exec"), vars(main))
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve():
    gc.disable()
    for name in IMPORTS.split():
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        assert not (found := set(FRAMEWORKS).intersection(sys.modules)), f"importing {name} has imported {found}"
    exec(sys.argv[1], {"__name__": "__main__"})
    gc.freeze()  # what is imported stays, in every fork
    gc.enable()
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            if not (child := os.fork()):
                signal.alarm(900)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = _child(json.loads(line))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [file.seek(0) or file.read() for file in (out, err)]
        print(json.dumps([code, *texts]), flush=True)


if __name__ == "__main__":
    _serve()
