"""torchtitan changed in one way at a time: the package follows, or stops with an error. Harmless changes pass."""

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")
from mutants import driver


@pytest.mark.parametrize(("framework", "mutant"), driver.cases("torchtitan"))
def test_a_changed_upstream_is_followed_or_refused(framework, mutant):
    driver.check(framework, mutant)
