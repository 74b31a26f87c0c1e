"""The router of a mixture of experts that does not see the factor: under torch.compile, and in checkpoints."""

from __future__ import annotations

import json
from functools import partial

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode
from olmo_core.optim import AdamWConfig
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerTrainModuleConfig
from support import olmo_core_models as small
from torch.utils.checkpoint import checkpoint

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.olmo_core.record import routers_of, saved_routers


def _train_module(made):
    settings = TransformerTrainModuleConfig(
        rank_microbatch_size=48, max_sequence_length=12, optim=AdamWConfig(lr=1e-3), z_loss_multiplier=None
    )
    return settings.build(made.build(init_device="meta"), device=torch.device("cpu"))


def _save(tmp_path, made):
    checkpointer, folder = Checkpointer(work_dir=tmp_path / "work"), tmp_path / "step1"
    checkpointer.save(folder, _train_module(made), {"step": 1})
    # as ConfigSaverCallback does after every save
    checkpointer.write_file(folder, "config.json", json.dumps({"model": made.as_config_dict()}))
    return checkpointer, folder


@pytest.mark.parametrize("saved", [True, False])
def test_resumed_with_the_other_router_it_is_refused(tmp_path, saved):
    made = small.with_scheme(small.config("moe"), scale_router=saved)
    checkpointer, folder = _save(tmp_path, made)
    other = small.with_scheme(small.config("moe"), scale_router=not saved)
    words = f"saved with block.scale_router={saved}, but this run has {not saved} in block 1.*Run with".lower()
    with pytest.raises(CheckpointMismatchError, match=f"(?i){words}"):
        checkpointer.load(folder, _train_module(other))
    with pytest.raises(CheckpointMismatchError, match=f"(?i){words}"):
        load_model_and_optim_state(folder / "model_and_optim", other.build())
    checkpointer.load(folder, _train_module(made))
    (folder / "config.json").unlink()  # a loop of one's own writes none: as before, nobody can tell
    checkpointer.load(folder, _train_module(other))


def test_routers_of_overridden_blocks(tmp_path):
    made = small.with_scheme(small.config("moe"), scale_router=False)
    dense = small.with_scheme(small.config()).block
    made.block_overrides = {1: dense, 2: small.with_scheme(small.config("moe")).block}
    _, folder = _save(tmp_path, made)
    assert saved_routers(folder) == {0: False, 1: True, 2: True, 3: False}
    built = made.build(init_device="meta")
    built.apply_activation_checkpointing(Mode.selected_modules, modules=["blocks.*.feed_forward_moe.router"])
    assert routers_of(built) == {0: False, 2: True, 3: False}


def test_routers_of_named_blocks(tmp_path):
    made = small.with_scheme(small.config("moe"), scale_router=False)
    made.block = {"seen": small.with_scheme(small.config("moe")).block, "not": made.block}
    made.block_pattern = ["seen", "not"]
    _, folder = _save(tmp_path, made)
    assert saved_routers(folder) == {0: True, 1: False, 2: True, 3: False} == routers_of(made.build(init_device="meta"))
    assert saved_routers(_save(tmp_path / "stock", small.config("moe"))[1]) == {}


@pytest.mark.slow
def test_compiled_and_recomputed_from_one_graph_for_all_blocks(monkeypatch):
    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = small.with_scheme(small.config("moe"), scale_router=False)
    expected, built = small.model(made), small.model(made)
    for block in built.blocks.values():
        block.compile(backend="aot_eager")
        # OLMo-core itself checkpoints parts of such a block only: a loop of one's own does it around the block.
        block._compiled_call_impl = partial(checkpoint, block._compiled_call_impl, use_reentrant=False)
    for model in (expected, built):
        small.loss_of(model(small.TOKENS)).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    wanted = dict(expected.named_parameters())
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6)
