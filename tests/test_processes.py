"""A command's process group: what of it is left when the command is done, and what torchrun did not say."""

import sys
from pathlib import Path

import pytest
from support import launch

LEFT = """
import os
from pathlib import Path
from olmo_lns.arguments import process_group

def gloo():
    return [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]

with process_group():
    import torch._dynamo  # imports functions that have the default group as a default argument
    assert gloo(), "no thread of gloo's to look for"
assert not gloo(), "gloo's threads outlive the group"
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc: lists the threads of a process")
def test_no_thread_outlives_the_group(tmp_path):
    launch.run([sys.executable, "-c", LEFT], cwd=tmp_path, env=launch.environment(CUDA_VISIBLE_DEVICES="")).ok()


@pytest.mark.slow
def test_a_world_without_a_rank_is_an_error(tmp_path):
    """Not a group of one, which would do half of the work and say nothing."""
    code = "from olmo_lns.arguments import process_group\nwith process_group(): print('alone')"
    env = launch.environment(WORLD_SIZE="2", RANK=None, CUDA_VISIBLE_DEVICES="")
    result = launch.run([sys.executable, "-c", code], cwd=tmp_path, env=env)
    assert result.code != 0 and "RANK" in result.last_line() and "alone" not in result.text
