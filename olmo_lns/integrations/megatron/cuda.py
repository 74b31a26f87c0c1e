"""Determine the environment variables of CUDA on which Megatron insists. They must be set before CUDA starts."""

from __future__ import annotations

from itertools import pairwise
from typing import Sequence

#: If one of these flags has a value above 1, Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs up to Hopper.
_ONE_CONNECTION = ("--tensor-model-parallel-size", "--context-parallel-size")
#: With one of these flags, Megatron asserts more than one connection, or leaves the choice to the user.
_MORE_CONNECTIONS = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm")


def cuda_environment(flags: Sequence[str]) -> dict[str, str]:
    """Return the environment variables for a launch with these flags, such as ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    >>> cuda_environment(["--tensor-model-parallel-size", "2"])
    {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
    """
    arguments = [part for flag in flags for part in flag.split("=", 1)]
    is_parallel = any(
        value.isdecimal() and int(value) > 1 for flag, value in pairwise(arguments) if flag in _ONE_CONNECTION
    )
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_parallel and not set(arguments) & set(_MORE_CONNECTIONS) else {}
