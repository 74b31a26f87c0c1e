"""The arguments that Megatron saves beside a model, as the parsers of its versions made them.

``megatron_arguments.json`` was recorded from the parsers of Megatron-LM's releases 0.14 to 0.20.
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
