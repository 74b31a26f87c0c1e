"""Each module in this folder has its own gloo group of one process with Megatron's parallel state."""

import pytest
from support.megatron_cpu import single_process

from olmo_lns.integrations.megatron import register


@pytest.fixture(scope="module", autouse=True)
def megatron():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    register()
    with single_process():
        yield


@pytest.fixture(autouse=True)
def fresh_messages():
    from olmo_lns.integrations.megatron import printing

    printing._printed.clear()
