"""Write the start-up line, which tells the user which scheme a model has and what was measured."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import fields
from logging.handlers import BufferingHandler, HTTPHandler, MemoryHandler, QueueHandler, SMTPHandler, SocketHandler
from typing import Any, Collection

from olmo_lns import sites
from olmo_lns.measured import Measured, describe
from olmo_lns.processes import is_first_process
from olmo_lns.scaled import Scaled
from olmo_lns.schemes import SUB_LAYERS, Learned, Plan, Scheme

log = logging.getLogger("olmo_lns")

#: Handlers that show a record to nobody, or that may lose it without an error.
_UNSEEN = (logging.NullHandler, QueueHandler, SocketHandler, HTTPHandler, SMTPHandler)


def compose(
    model: Any,
    n_layers: int,
    *,
    measured: Collection[Measured],
    sites_not_run: str = "",
    norm: str = "",
    local: str = "",
    initialization: str = "",
) -> str:
    """Return the start-up line of a model. The scheme is read from the model itself.

    :param n_layers: number of blocks of the whole model.
    :param measured: what was measured, such as ``{Measured.OUTPUT, Measured.GRADIENT}``.
    :param sites_not_run: why the blocks could not be run to measure the sites, if they could not.
    :param norm: name of the stock norm, such as ``RMSNorm``.
    :param local: description of the part of the model in this process, if it is not the whole model.
    :param initialization: what the line says about the initialization, such as ``"scaled initialization off"``.

    Example: ``LayerNorm Scaling on: 64 norms; s = 1 (block 1) to 0.1768 (block 32); measured: sites, output``.
    """
    scheme = sites.read_back(model)
    norms = scheme.norm_count(n_layers)
    if scheme.only_scales_norms(n_layers) and not local:
        norms = len({each.module for each in sites.in_model(model)})  # parallel blocks may share one norm
    count = f"{norms} norms" + (f" ({norm})" if norm else "") + (f", {local}" if local else "")
    modules = [each.module for each in sites.in_model(model)]
    ways = dict.fromkeys(_application(module) for module in modules if isinstance(module, Scaled))
    parameters = ", ".join(f"{key} {value:g}" for key, value in scheme.values)
    parts = [count, *describe_factors(scheme, n_layers), parameters, *ways, initialization]
    parts.append(describe(measured, sites_not_run=sites_not_run))
    return f"{scheme.definition.title} on: {'; '.join(part for part in parts if part)}"


def write(line: str) -> None:
    """Write the start-up line to the log. In the first process, write it to stderr too if no handler shows it."""
    log.info("%s", line)
    if is_first_process() and not _is_shown(log.makeRecord(log.name, logging.INFO, __file__, 0, "%s", (line,), None)):
        with suppress(OSError, ValueError):  # stderr is closed, as in a daemon
            print(line, file=sys.stderr)


def _is_shown(record: logging.LogRecord) -> bool:
    """Return true if a handler of the log, or of a logger above it, shows the record to somebody."""
    if not log.isEnabledFor(record.levelno) or not log.filter(record):
        return False
    logger: logging.Logger | None = log
    while logger is not None:
        if any(record.levelno >= handler.level and _shows(handler, record) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _shows(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Return true if a handler passes a record on, at once or when it is closed.

    A queue and a network connection count as lost, because the handler cannot tell whether anybody reads them.
    """
    if isinstance(handler, _UNSEEN) or type(handler) is BufferingHandler:
        return False
    if not handler.filter(record):
        return False
    if isinstance(handler, MemoryHandler):  # which does not compare the level of its target
        return handler.target is not None and handler.flushOnClose and _shows(handler.target, record)
    console = getattr(handler, "console", None)  # of rich
    stream = getattr(handler, "stream", getattr(console, "file", None))
    is_open = not getattr(console, "quiet", False) and not getattr(stream, "closed", False)
    return is_open and getattr(stream, "name", None) != os.devnull


def _application(module: Any) -> str:
    if module.lns_how_applied:
        return str(module.lns_how_applied)
    return f"backend {module.lns_backend.name} ({module.lns_backend.reason})"


def describe_factors(scheme: Scheme, n_layers: int) -> list[str]:
    """Describe what a scheme does in the blocks of a model.

    The result lists constant factors other than 1, learned factors, and the blocks that are Post-LN. For LayerNorm
    Scaling with 16 blocks it is ``["s = 1 (block 1) to 0.25 (block 16)"]``.
    """
    plans = {(number, sub_layer): plan for number, sub_layer, plan in scheme.plans(n_layers)}
    descriptions = []
    for field in fields(Plan):
        values = [getattr(plan, field.name) for plan in plans.values()]
        if isinstance(field.default, float) and any(value != 1.0 for value in values):
            name = "s" if field.name == "norm_scale" else field.name
            # Some schemes scale attention or feed-forward alone.
            by_sub_layer = [(sub_layer, value) for (_, sub_layer), value in zip(plans, values, strict=True)]
            scaled = {sub_layer for sub_layer, value in by_sub_layer if value != 1.0}
            ranges: dict[str, str] = {}
            for sub_layer in (each for each in SUB_LAYERS if each in scaled):
                factors = [value for each, value in by_sub_layer if each == sub_layer]
                ranges[sub_layer] = f"{factors[0]:.4g} (block 1) to {factors[-1]:.4g} (block {n_layers})"
            if len(ranges) == len(SUB_LAYERS) and len(set(ranges.values())) == 1:
                descriptions.append(f"{name} = {next(iter(ranges.values()))}")
            elif len(ranges) == 1:
                descriptions += [f"{name} = {text}, {sub_layer} only" for sub_layer, text in ranges.items()]
            else:
                descriptions += [f"{name} = {text}, {sub_layer}" for sub_layer, text in ranges.items()]
        if learned := [
            (name, value) for (_, name), value in zip(plans, values, strict=True) if isinstance(value, Learned)
        ]:
            only = {name for name, _ in learned}
            suffix = f", {only.pop()} only" if len(only) == 1 else ""
            first, last = learned[0][1].start, learned[-1][1].start
            descriptions.append(f"learned {field.name} from {first:.4g} to {last:.4g}{suffix}")
    post = sorted({number for (number, _), plan in plans.items() if plan.norm_on_sum})
    if post:
        descriptions.append(f"norm after the addition in blocks {post[0]} to {post[-1]}")
    return descriptions
