"""The guard of checkpoints in several processes: they go on together, or stop together."""

from __future__ import annotations

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

from olmo_core.testing import run_distributed_test
from support import olmo_core_guard_ranks


@pytest.mark.slow
def test_a_record_that_cannot_be_read_stops_all():
    run_distributed_test(olmo_core_guard_ranks.unreadable, start_method="spawn")


@pytest.mark.slow
def test_the_record_is_told_to_the_group_that_loads(tmp_path):
    run_distributed_test(olmo_core_guard_ranks.groups_of_their_own, start_method="spawn", func_args=(tmp_path,))
