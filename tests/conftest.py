"""The order of the test files; objects that stay are hidden from the garbage collector."""

import gc
import importlib.util

import pytest

# With Python's threshold of 700 new objects, a sixth of the time of the imports goes into garbage collection.
gc.set_threshold(50_000, 20, 100)
_frozen = ""
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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Put the files with slow tests first, so that no worker starts a long file when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_setup(item):
    """Collect and freeze before the first test of every file.

    torch, transformers, OLMo and Megatron hold some million objects. OLMo's trainer collects explicitly, several times
    at every checkpoint, and would look at each object again: that took a third of the time of its tests.
    """
    global _frozen
    if (file := item.nodeid.partition("::")[0]) != _frozen:
        _frozen = file
        gc.collect()
        gc.freeze()
    return (yield from _skip_without_olmo())
