"""A pytest plugin (``-p support.megatron_unit``): unit tests in Megatron's own style, on a CPU over gloo."""

import functools
import sys
import types
import typing

import torch.distributed as dist
import typing_extensions

from support import megatron_cpu

if not hasattr(typing, "override"):  # main wants Python 3.12
    typing.override = typing_extensions.override
_cuda = megatron_cpu.cuda_answered()
_cuda.__enter__()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402

random.model_parallel_cuda_manual_seed = functools.partial(
    random.model_parallel_cuda_manual_seed, inference_rng_tracker=True, force_reset_rng=True
)


class Utils:
    """A replacement of ``tests.unit_tests.test_utilities.Utils``, which asks for NCCL."""

    @staticmethod
    def initialize_model_parallel(tp=1, pp=1):
        megatron_cpu.initialize(tp, pp)

    @staticmethod
    def destroy_model_parallel():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


_utilities = types.ModuleType("tests.unit_tests.test_utilities")
_utilities.Utils = Utils
sys.modules[_utilities.__name__] = _utilities
