"""One gloo process with Megatron's parallel state for the tests of each module in this folder, and gone before the next."""

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
    from olmo_lns.integrations.megatron import building

    building._said.clear()
