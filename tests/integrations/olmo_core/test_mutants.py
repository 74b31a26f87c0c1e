"""OLMo-core changed in one way at a time: the package follows, or stops with an error. Harmless changes pass."""

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")
from mutants import driver


@pytest.mark.parametrize(("framework", "mutant"), driver.cases("olmo_core"))
def test_a_changed_upstream_is_followed_or_refused(framework, mutant):
    driver.check(framework, mutant)
