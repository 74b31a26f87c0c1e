"""The start-up line reaches the user, whatever the logging of a launch does."""

import io
import logging
import logging.config
import os
import queue
import sys
from logging.handlers import (
    BufferingHandler,
    DatagramHandler,
    MemoryHandler,
    QueueHandler,
    QueueListener,
    SocketHandler,
)

import pytest
from rich.console import Console
from rich.logging import RichHandler
from support import forked

from olmo_lns import start_up_line

LINE = "LayerNorm Scaling on: 2 norms"


def reject(record):
    return False


@pytest.mark.parametrize(
    ("level", "handler_level", "change", "is_logged"),
    [
        (logging.INFO, logging.INFO, None, True),
        (logging.WARNING, logging.INFO, None, False),
        (logging.INFO, logging.WARNING, None, False),
        (logging.INFO, logging.INFO, lambda log, handler: handler.addFilter(reject), False),
        (logging.INFO, logging.INFO, lambda log, handler: log.addFilter(reject), False),
        (logging.INFO, logging.INFO, lambda log, handler: setattr(log, "propagate", False), False),
        (logging.INFO, logging.INFO, lambda log, handler: setattr(log, "disabled", True), False),
    ],
    ids=["shown", "logger level", "handler level", "handler filter", "logger filter", "propagate", "disabled"],
)
def test_the_line_is_in_the_log_or_on_stderr(level, handler_level, change, is_logged, monkeypatch, capsys):
    root, log, records = logging.Logger("root", level), logging.Logger("olmo_lns"), []
    handler = logging.Handler(handler_level)
    handler.emit = lambda record: records.append(record.getMessage())
    root.addHandler(handler)
    log.parent = root
    log.addHandler(logging.NullHandler())
    if change is not None:
        change(log, handler)
    monkeypatch.setattr(start_up_line, "log", log)
    start_up_line.write(LINE)
    assert records == [LINE] * is_logged
    assert capsys.readouterr().err == ("" if is_logged else f"{LINE}\n")


def write(monkeypatch, *handlers):
    """Write the line to a log with these handlers."""
    log = logging.Logger("olmo_lns")
    for handler in handlers:
        log.addHandler(handler)
    monkeypatch.setattr(start_up_line, "log", log)
    start_up_line.write(LINE)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "make",
    [
        lambda: MemoryHandler(10),
        lambda: MemoryHandler(10, target=logging.NullHandler()),
        lambda: MemoryHandler(10, target=MemoryHandler(10)),
        lambda: MemoryHandler(10, target=logging.StreamHandler(io.StringIO()), flushOnClose=False),
        lambda: BufferingHandler(10),
        lambda: QueueHandler(queue.Queue()),
        lambda: logging.StreamHandler(closed()),
        lambda: logging.FileHandler(os.devnull),
        lambda: SocketHandler("127.0.0.1", 9),
        lambda: DatagramHandler("127.0.0.1", 9),
        lambda: RichHandler(console=Console(quiet=True)),
        lambda: RichHandler(console=Console(file=open(os.devnull, "w"))),  # noqa: SIM115
        lambda: RichHandler(console=Console(file=closed())),
    ],
    ids=[
        "no target",
        "a null target",
        "a target without one",
        "never flushed",
        "a buffer",
        "a queue",
        "closed stream",
        "os.devnull",
        "a server that is down",
        "datagrams",
        "a quiet console",
        "a console at os.devnull",
        "a console at a closed stream",
    ],
)
def test_the_line_is_on_stderr_if_its_handler_keeps_the_record(make, monkeypatch, capsys):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # a closed stream is reported otherwise
    write(monkeypatch, make())
    assert capsys.readouterr().err == f"{LINE}\n"


def test_a_line_that_a_memory_handler_passes_on_is_not_on_stderr(monkeypatch, capsys):
    stream = io.StringIO()
    handler = MemoryHandler(10, target=logging.StreamHandler(stream))
    handler.target.setLevel(logging.ERROR)  # which a MemoryHandler does not ask for
    write(monkeypatch, handler)
    handler.close()
    assert stream.getvalue() == f"{LINE}\n" and not capsys.readouterr().err


def test_a_line_is_in_the_log_even_if_its_target_is_set_later_and_its_queue_is_read(monkeypatch, capsys):
    stream, lines = io.StringIO(), queue.Queue()
    handler = MemoryHandler(10)
    write(monkeypatch, handler, QueueHandler(lines))
    assert capsys.readouterr().err == f"{LINE}\n"
    handler.setTarget(logging.StreamHandler(stream))
    handler.close()
    listener = QueueListener(lines, logging.StreamHandler(stream))
    listener.start()
    listener.stop()
    assert stream.getvalue() == 2 * f"{LINE}\n"


def test_a_file_that_is_opened_late_shows_the_line(tmp_path, monkeypatch, capsys):
    write(monkeypatch, logging.FileHandler(tmp_path / "log", delay=True))
    assert (tmp_path / "log").read_text() == f"{LINE}\n" and not capsys.readouterr().err


def test_a_line_on_the_console_of_rich_is_not_on_stderr(monkeypatch, capsys):
    stream = io.StringIO()
    write(monkeypatch, RichHandler(console=Console(file=stream, width=200)))
    assert LINE in stream.getvalue() and not capsys.readouterr().err


#: Configures logging as a launch may do, and writes the line.
CONFIGURES = f"""
import logging.config
from olmo_lns import start_up_line
{{}}
start_up_line.write({LINE!r})
"""


@pytest.mark.parametrize(
    "configure",
    [
        "logging.config.dictConfig({'version': 1})",
        "logging.disable(logging.INFO)",
        "logging.config.dictConfig({'version': 1, 'loggers': {'olmo_lns': {'level': 'ERROR'}}})",
        "import sys; sys.stdout, sys.stderr = sys.stderr, None",
    ],
    ids=["loggers that exist are disabled", "logging is disabled", "the level of the package", "no stderr"],
)
def test_a_configuration_of_logging_does_not_hide_the_line(configure):
    done = forked.run(CONFIGURES.format(configure))
    assert done.stderr.splitlines()[-1:] == [LINE], done.stdout + done.stderr


def test_a_launch_without_stderr_goes_on(monkeypatch):
    monkeypatch.setattr(sys, "stderr", closed())
    write(monkeypatch, logging.NullHandler())
