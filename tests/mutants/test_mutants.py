"""Upstream changed in one way at a time: the package follows, or stops with an error. Harmless changes pass."""

import importlib.util

import pytest
from mutants import driver

_MODULES = {"olmo": "olmo", "megatron": "megatron", "megatron_te": "megatron"}


@pytest.mark.parametrize(
    ("framework", "mutant"), driver.cases("olmo", "megatron", "megatron_te", "transformers", "gpt2")
)
def test_a_changed_upstream_is_followed_or_refused(framework, mutant):
    module = _MODULES.get(framework, "transformers")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    driver.check(framework, mutant)
