"""The Megatron symbols that are replaced, or whose source the package relies on.

``fingerprints.json`` beside this file has, for each, the sources that were read and tested: fingerprint -> versions of
Megatron Core. ``scripts/fingerprints.py olmo_lns.integrations.megatron.upstream`` prints those of a source tree.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from olmo_lns.integrations import patching
from olmo_lns.integrations.patching import Target

#: What is set aside where it is not verified (olmo_lns.integrations.patching).
CORE, TRAINING, BRIDGE = "Megatron Core", "Megatron-LM", "Megatron Bridge"

#: Verified versions of Megatron Core; "main" is the 0.20.0 of August 2026.
VERSIONS = ("0.14.0", "0.15.3", "0.16.1", "0.17.0", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "main")

TARGETS = tuple(
    Target(path, verified)
    for path, verified in json.loads(Path(__file__).with_name("fingerprints.json").read_text("utf-8")).items()
)


def target(name: str) -> Target:
    """The one whose path ends with ``name``, such as ``TransformerLayer.__init__``."""
    (found,) = (each for each in TARGETS if each.path.endswith(f":{name}"))
    return found


@functools.cache
def check_readings() -> None:
    """:raises UpstreamChangedError: what a layer's two slots hold, or who calls them, is not what was read."""
    for each in TARGETS:
        needed = each.path.endswith((":get_bias_dropout_add", "._forward_attention", "._forward_mlp"))
        step = each.path.endswith(("._forward_post_mlp", "_bda_step"))  # of some versions
        if needed or (step and patching.exists(each)):
            patching.verify(each, each.locate()[2])
