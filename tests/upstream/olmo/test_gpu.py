"""What OLMo runs on CUDA only: its launcher under ddp and fsdp, CUDA autocast, unsharded saving under fsdp."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import launch

from olmo_lns.record import Record
from olmo_lns.schemes import parse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs CUDA: OLMo's script forces `single` on CPU, its autocast is CUDA's"
    ),
]

LNS = Record(parse("lns"), "rms", "plain")
FSDP = ["--distributed_strategy=fsdp", "--model.init_device=meta", "--fsdp.wrapping_strategy=by_block"]
MIXED = ["--precision=amp_bf16", "--fsdp.precision=mixed"]
LAUNCHES: dict[str, list[str]] = {
    "ddp": ["--distributed_strategy=ddp", "--model.init_device=cuda"],
    "ddp amp_bf16": ["--distributed_strategy=ddp", "--model.init_device=cuda", "--precision=amp_bf16"],
    "fsdp": FSDP,
    "fsdp unwrapped": [*FSDP[:2], "--fsdp.wrapping_strategy=null"],
    "fsdp amp_bf16": [*FSDP, *MIXED],
    "fsdp amp_bf16, compiled, checkpointing": [
        *FSDP,
        *MIXED,
        "--compile.fullgraph=false",
        "--activation_checkpointing=whole_layer",
    ],
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_unmodified_launch_on_cuda(checkout: Any, name: str) -> None:
    changes = {"max_duration": 30, "stop_at": 30, "save_interval_unsharded": 30, "save_interval": 30}
    folder = checkout.folder / name.replace(" ", "-").replace(",", "")
    path = launch.write_script_config(folder, **changes)
    arguments = [checkout.script, path, "--model.layer_norm_type=lns", *LAUNCHES[name]]
    result = launch.torchrun(checkout.python, 1, *arguments, cwd=checkout.folder).ok()
    losses = result.losses()
    assert len(losses) == 30 and all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.3
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    assert Record.read(folder / "run" / "step30-unsharded") == LNS
