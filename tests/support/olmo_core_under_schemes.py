"""A pytest plugin for OLMo-core's own tests: every model they build gets the scheme of its block type.

cd OLMo-core/src && PYTHONPATH=.:…/olmo-lns/tests python -m pytest -p support.olmo_core_under_schemes test/nn/transformer

In the processes that a test starts, the sitecustomize in olmo_core_site does the same. They read weights that were
saved without config or record. The guard takes these for Pre-LN, and here it is told to allow them.
"""

import copy
import os
from pathlib import Path

from olmo_core.nn.transformer import TransformerConfig

from olmo_lns.integrations.olmo_core.layouts import LAYOUTS
from olmo_lns.olmo_core import apply

_TESTS = Path(__file__).resolve().parents[1]
os.environ["OLMO_CORE_UNDER_SCHEMES"] = "1"
_PATHS = [str(_TESTS / "support" / "olmo_core_site"), str(_TESTS), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_PATHS))
os.environ["OLMO_LNS_ALLOW_MISMATCH"] = "1"

_build = TransformerConfig.build
built = 0


def _scheme_of(config):
    names = {str(block.name) for block in config.resolved_block_configs}
    if len(names) != 1 or not names <= set(LAYOUTS):
        return None
    name = names.pop()
    return "lns" if LAYOUTS[name].factor_name == "norm_scale" else "branchln_depth"


def build(self, **kwargs):
    global built
    scheme = _scheme_of(self)
    if scheme is None:
        return _build(self, **kwargs)
    built += 1
    return _build(apply(copy.deepcopy(self), scheme), **kwargs)


TransformerConfig.build = build


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{built} models were built under a scheme")
