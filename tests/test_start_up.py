"""The start-up line reaches the user, whatever the logging of a launch does."""

import logging

import pytest

from olmo_lns import start_up

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
    monkeypatch.setattr(start_up, "log", log)
    start_up.write_line(LINE)
    assert records == [LINE] * is_logged
    assert capsys.readouterr().err == ("" if is_logged else f"{LINE}\n")
