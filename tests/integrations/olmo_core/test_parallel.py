"""Four gloo processes on one CPU: data, tensor and pipeline parallel give what one process gives."""

from __future__ import annotations

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

from olmo_core.testing import run_distributed_test
from support import olmo_core_ranks


@pytest.mark.slow
def test_ddp_fsdp_hsdp_tensor_pipeline_and_context_parallel():
    blocks = ("default", "reordered_norm", "peri_norm")
    run_distributed_test(
        olmo_core_ranks.everything, world_size=4, backend="gloo", start_method="spawn", func_args=(blocks,)
    )
