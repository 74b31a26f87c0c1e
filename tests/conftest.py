"""The order of the test files; objects that stay are hidden from the garbage collector; configs are parsed once."""

import functools
import gc
import importlib.util
import os
import pickle
import sys
from pathlib import Path

import pytest
from support import forked

# With Python's threshold of 700 new objects, a sixth of the time of the imports goes into garbage collection.
gc.set_threshold(50_000, 20, 100)
_frozen = ""
_parsed = {}
if "PYTEST_XDIST_WORKER" in os.environ and sys.platform.startswith("linux"):
    forked.fork_worker()
WITHOUT_OLMO = importlib.util.find_spec("olmo") is None
collect_ignore_glob = ["integrations/olmo/*", "upstream/olmo/*"] if WITHOUT_OLMO else []


def _skip_without_olmo():
    """Skip a test that imports OLMo where OLMo is not installed, as on Python 3.13."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if WITHOUT_OLMO and (error.name or "").partition(".")[0] in ("olmo", "omegaconf", "ai2-olmo"):
            pytest.skip("needs ai2-olmo")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    return (yield from _skip_without_olmo())


#: The files of slow tests that take longest, a quarter of a minute and more, each on one worker.
LONGEST = """
demo/test_demo.py mutants/test_mutants.py upstream/olmo/test_launch.py upstream/olmo/test_strategies.py
study/test_launch.py recipes/test_vision.py recipes/test_fine_tuning.py study/test_plan.py test_benchmarks.py
integrations/olmo/test_stock.py golden/test_golden.py integrations/transformers/test_stock.py study/test_evidence.py
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Put the files with slow tests first, and the longest of them foremost.

    So no worker starts a long file when the others are done.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    longest = [Path(__file__).parent / name for name in LONGEST.split()]
    place = {path: longest.index(path) if path in longest else len(longest) for path in slow}
    items.sort(key=lambda item: place.get(item.path, len(longest) + 1))


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_setup(item):
    """Collect and freeze before the first test of every file.

    torch, transformers, OLMo and Megatron hold some million objects. OLMo's trainer collects explicitly, several times
    at every checkpoint, and would look at each object again: that took a third of the time of its tests.
    """
    global _frozen
    if (file := item.nodeid.partition("::")[0]) != _frozen:
        _frozen = file
        remember_parsed_configs()
        gc.collect()
        gc.freeze()
    return (yield from _skip_without_olmo())


def remember_parsed_configs():
    """Let OmegaConf keep the schema of each class of settings, and the content of each text that it has parsed.

    OLMo's ``TrainConfig.load`` builds the schema of its several hundred settings anew each time and parses the file in
    Python. A third of its time went into what had been computed before. The rest, which merges, converts and checks,
    runs as ever. ``OmegaConf.merge`` copies the schema before it writes into it. Copies are made by pickle, which takes a
    quarter of the time of deepcopy.
    """
    OmegaConf = getattr(sys.modules.get("omegaconf"), "OmegaConf", None)
    if OmegaConf is None or hasattr(OmegaConf.load, "__wrapped__"):
        return
    DictConfig = sys.modules["omegaconf"].DictConfig
    structured, load, deepcopy = OmegaConf.structured, OmegaConf.load, DictConfig.__deepcopy__
    of_class = functools.cache(structured)

    @functools.wraps(structured)
    def structured_once(obj, *args, **kwargs):
        return of_class(obj) if isinstance(obj, type) and not (args or kwargs) else structured(obj, *args, **kwargs)

    @functools.wraps(load)
    def load_once(file_):
        if not isinstance(file_, (str, Path)):
            return load(file_)
        text = Path(file_).read_bytes()
        if text not in _parsed:
            _parsed[text] = pickle.dumps(load(file_))
        return pickle.loads(_parsed[text])

    @functools.wraps(deepcopy)
    def copy_by_pickle(self, memo):
        # A pickle of a part would have the whole.
        return deepcopy(self, memo) if self._get_parent() else pickle.loads(pickle.dumps(self))

    OmegaConf.structured, OmegaConf.load = staticmethod(structured_once), staticmethod(load_once)
    DictConfig.__deepcopy__ = copy_by_pickle
