"""For every file: what is imported for good is taken out of the garbage collector's sight, what was read is forgotten."""

import gc

import pytest

_frozen = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before the first test of every file.

    torch, transformers, OLMo and Megatron are some million objects. OLMo's trainer collects by hand, several times at
    every checkpoint, and would look at each of them again: a third of the time of its tests.
    """
    global _frozen
    if (file := item.nodeid.partition("::")[0]) != _frozen:
        _frozen = file
        gc.collect()
        gc.freeze()
