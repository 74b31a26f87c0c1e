"""Run programs in forks of one interpreter that has imported torch and what the frameworks import, and no framework.

A new interpreter needs seconds for these imports. The start-up hook has run in it as in any other. Where the imports or
the start of an interpreter are what is tested, start a new one. A fork runs no atexit functions.

A worker of pytest-xdist imports all this for its tests anyway. It becomes that interpreter by a fork of its own, before
it imports a framework (:func:`fork_worker`). Otherwise the first test that needs the interpreter starts it.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

IMPORTS = """
torch torch.distributed.fsdp torch.distributed.checkpoint torch.distributed.tensor torch.distributions torch._dynamo
numpy omegaconf cached_path rich datasets wandb sklearn.metrics tokenizers safetensors.torch huggingface_hub boto3
google.cloud.storage scipy.signal scipy.stats matplotlib.pyplot pandas
"""
FRAMEWORKS = ("olmo", "olmo_core", "megatron", "transformers", "olmo_lns")


_of_this_worker = None  # the interpreter that :func:`fork_worker` made: where to write requests, where to read replies


@functools.cache
def _server(first, start):
    """Return the two files by which the interpreter that forks, after ``first``, takes requests and gives replies.

    :param start: changes of the environment in which it starts.
    """
    if _of_this_worker and not start:
        return _after(first) if first else _of_this_worker
    command = [sys.executable, "-W", "ignore", __file__, first]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", **dict(start)}  # huggingface_hub reads it when it is imported
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(command, stdin=theirs, cwd="/", env=offline)
    atexit.register(lambda: (process.kill(), process.wait()))
    return ours.makefile("w"), ours.makefile("r")


def _after(first):
    """A fork of this worker's interpreter that has run ``first`` and forks in its turn."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path := f"{folder}/requests")
        listening.listen()
        print(json.dumps({"serve": path, "first": first}), file=_of_this_worker[0], flush=True)
        connection, _ = listening.accept()
    return connection.makefile("w"), connection.makefile("r")


def fork_worker():
    """Import what the frameworks import, and fork the interpreter that forks from this process.

    In a new environment Python compiles each module when it is first imported. Every second worker imports in the
    opposite order, and so two workers compile one half each.
    """
    global _of_this_worker
    plain_path = subprocess.run(
        [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"], capture_output=True, check=True
    ).stdout
    _import_all(is_reversed=os.environ["PYTEST_XDIST_WORKER"][-1] in "13579")
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        _of_this_worker = ours.makefile("w"), ours.makefile("r")
        return
    try:
        _forget_pytest(json.loads(plain_path))
        os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1024)
        _serve(socket.socket(fileno=3))
    finally:
        os._exit(0)


def _forget_pytest(plain_path):
    """Make this fork of a worker an interpreter like any other that has the same modules loaded."""
    import faulthandler

    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:], sys.warnoptions[:] = plain_path, ["ignore"]
    sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest")]
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True
    os.chdir("/")


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
    requests, replies = _server(first, tuple(dict(start).items()))
    print(json.dumps(requested), file=requests, flush=True)
    returncode, stdout, stderr = json.loads(replies.readline())
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


_TORCHRUN = """
import os, runpy, socket, sys
import torch, {imports}

ranks, *words = sys.argv[1:]
with socket.socket() as free:
    free.bind(("localhost", 0))
    shared = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))

def run(rank):
    os.environ |= shared | dict(RANK=str(rank), LOCAL_RANK=str(rank))
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")

torch.multiprocessing.start_processes(run, nprocs=int(ranks), start_method="fork")
"""


def torchrun(ranks, *words, imports, **options):
    """Run a program, or ``-m`` and a module, as ``torchrun`` does, in forks of a process that has imported ``imports``.

    :param options: of :func:`run`.
    """
    return run(_TORCHRUN.format(imports=imports), ranks, *words, **options)


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


def _import_all(is_reversed=False):
    gc.disable()
    for name in IMPORTS.split()[:: -1 if is_reversed else 1]:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        assert not (found := set(FRAMEWORKS).intersection(sys.modules)), f"importing {name} has imported {found}"
    gc.enable()


def _serve(connection, first=""):
    """Run each request in a fork and reply, until the other end is closed."""
    exec(first, {"__name__": "__main__"})
    gc.freeze()  # what is imported stays, in every fork
    requests, replies = (connection.makefile(mode) for mode in "rw")
    for line in requests:
        requested = json.loads(line)
        if "serve" in requested:
            if not os.fork():
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(requested["serve"])
                _serve(connection, requested["first"])
                os._exit(0)
            continue
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            if not (child := os.fork()):
                signal.alarm(900)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = _child(requested)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [file.seek(0) or file.read() for file in (out, err)]
        print(json.dumps([code, *texts]), file=replies, flush=True)


if __name__ == "__main__":
    _import_all()
    _serve(socket.socket(fileno=0), sys.argv[1])
