"""The arguments that Megatron saves beside a model, as the parsers of its versions made them.

``megatron_arguments.json`` is written by ``tests/export/programs/record_megatron_arguments.py`` from checkouts, and
compared with the checkout that MEGATRON_LM_SRC names.
"""

import argparse
import json
from pathlib import Path

#: Version of Megatron -> case -> what it saves.
RECORDED = json.loads(Path(__file__).with_name("megatron_arguments.json").read_text())
#: Case -> the flags that the program adds to those of a small model.
FLAGS = RECORDED.pop("flags")


def saved_arguments(version, case="base"):
    """What ``version`` (two numbers) saves for the flags of ``case``; None where it has no such flag."""
    changed = RECORDED[version][case]
    return None if changed is None else argparse.Namespace(**RECORDED[version]["base"] | changed)


class _Reading(argparse.Namespace):
    """A namespace that notes which of its attributes are read."""

    def __getattribute__(self, name):
        if not name.startswith("_"):
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return object.__getattribute__(self, name)


def names_read(args):
    """The arguments that the exporter reads."""
    from olmo_lns.checkpoints.megatron import architecture, gain_shift
    from olmo_lns.integrations.megatron.settings import Settings

    reading = _Reading(**vars(args))
    architecture(reading, 128, "recorded")
    gain_shift(reading, "recorded")
    Settings.of(reading).record(reading)
    found = vars(reading)["_read"]
    return found
