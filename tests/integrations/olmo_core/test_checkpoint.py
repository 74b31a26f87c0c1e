"""OLMo-core's own checkpointer: a run resumes only under the scheme that its checkpoint's config.json names."""

import json

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.optim import AdamWConfig
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerTrainModuleConfig
from support import olmo_core_models as small

from olmo_lns import sites
from olmo_lns.errors import CheckpointMismatchError, MeasurementError
from olmo_lns.integrations.olmo_core.checkpoint import scheme_of_config
from olmo_lns.integrations.olmo_core.model import scheme_of_model
from olmo_lns.olmo_core import apply
from olmo_lns.schemes import Scheme


def _train_module(model_config):
    settings = TransformerTrainModuleConfig(
        rank_microbatch_size=48, max_sequence_length=12, optim=AdamWConfig(lr=1e-3), z_loss_multiplier=None
    )
    return settings.build(model_config.build(init_device="meta"), device=torch.device("cpu"))


def _save(tmp_path, model_config):
    """A checkpoint, and the config.json that ConfigSaverCallback writes after every save."""
    checkpointer, folder = Checkpointer(work_dir=tmp_path / "work"), tmp_path / "step1"
    checkpointer.save(folder, _train_module(model_config), {"step": 1})
    checkpointer.write_file(folder, "config.json", json.dumps({"model": model_config.as_config_dict()}))
    return checkpointer, folder


def test_a_run_resumes_only_under_the_scheme_of_its_checkpoint(tmp_path, monkeypatch):
    model_config = {
        "preln": small.config(),
        "lns": apply(small.config()),
        "other": apply(small.config(), exponent=0.25),
    }
    saved = {name: _save(tmp_path / name, config) for name, config in model_config.items() if name != "other"}
    for was, now, message in (
        ("lns", "preln", r"says lns, .* has preln.*--model.block._CLASS_=olmo_lns.olmo_core.BlockConfig.*scheme=lns"),
        ("preln", "lns", "says preln, but this run has lns"),
        ("lns", "other", "has lns:exponent=0.25"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            saved[was][0].load(saved[was][1], _train_module(model_config[now]))
    checkpointer, folder = saved["preln"]
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata.json",
        "config.json",
        "model_and_optim",
        "train",
    ]
    assert checkpointer.load(folder, _train_module(model_config["preln"]))["step"] == 1
    checkpointer, folder = saved["lns"]
    checkpointer.load(folder, _train_module(model_config["lns"]))
    weights = folder / "model_and_optim"  # a trainer starts from either
    with pytest.raises(CheckpointMismatchError, match="this run has preln"):
        checkpointer.load(weights, _train_module(model_config["preln"]), load_optim_state=False)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointMismatchError, match="config.json cannot be read"):
        checkpointer.load(folder, _train_module(model_config["lns"]))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointMismatchError, match="no config was found beside its weights"):
        checkpointer.load(folder, _train_module(model_config["lns"]))
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "1")
    saved["preln"][0].load(saved["preln"][1], _train_module(model_config["lns"]))


@pytest.mark.parametrize("block", small.SCHEMES)
def test_every_norm_is_a_site_and_the_schemes_of_config_and_model_agree(block):
    scheme, norms = small.SCHEMES[block]
    model_config = small.with_scheme(small.config(block), exponent=0.25)
    expected = Scheme.of(scheme, exponent=0.25)
    assert scheme_of_config({"model": model_config.as_config_dict()}, source="x") == expected
    built = model_config.build(init_device="meta")
    assert scheme_of_model(built) == expected and len(list(sites.in_model(built))) == len(norms) * small.LAYERS
    for number, each in enumerate(built.blocks.values(), start=1):
        assert [getattr(each, name).lns_scale for name in norms] == [number**-0.25] * len(norms)
    for name in {norms[0], norms[-1]}:
        norm = getattr(built.blocks["1"], name)
        norm.lns_scale, kept = 1.0, norm.lns_scale
        with pytest.raises(MeasurementError, match=r"block 2, .*: found (norm|output)_scale=1.0"):
            scheme_of_model(built)
        norm.lns_scale = kept
    if len(norms) == 3:  # the experts have a norm, which other code replaces
        kept = built.blocks["1"].feed_forward_moe_norm
        built.blocks["1"].feed_forward_moe_norm = torch.nn.Identity()
        with pytest.raises(MeasurementError, match="block 2: feed_forward_moe_norm has no factor"):
            scheme_of_model(built)
        built.blocks["1"].feed_forward_moe_norm = kept
    built.blocks["1"], built.blocks["3"] = built.blocks["3"], built.blocks["1"]
    with pytest.raises(MeasurementError, match=r"Expected it on \[\(2, 'attn'\)"):
        scheme_of_model(built)
    lost = model_config.as_config_dict() | {"block_overrides": {"1": small.config(block).block.as_config_dict()}}
    with pytest.raises(CheckpointMismatchError, match="Expected one"):
        scheme_of_config(lost, source="x")
    lost = model_config.as_config_dict()
    lost["block"]["scale_router"] = False
    with pytest.raises(CheckpointMismatchError, match="router"):
        scheme_of_config(lost, source="x")
