"""Upstream changed in one way at a time: the package follows, or stops with an error. Harmless changes pass."""

import importlib.util

import pytest
from mutants import driver


@pytest.mark.parametrize(("framework", "mutant"), driver.cases("olmo", "megatron", "transformers", "gpt2"))
def test_a_changed_upstream_is_followed_or_refused(framework, mutant):
    if importlib.util.find_spec(module := "transformers" if framework == "gpt2" else framework) is None:
        pytest.skip(f"{module} is not installed")
    driver.check(framework, mutant)
