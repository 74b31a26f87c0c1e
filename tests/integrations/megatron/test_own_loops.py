"""Models that are built, saved and loaded without Megatron's launcher: the layer spec, the config, the record."""

import copy
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron import apply, layer_spec
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.record import Record
from olmo_lns.schemes import parse

TESTS = Path(__file__).parents[2]


def field_by_field(cfg):
    return type(cfg)(**{each.name: getattr(cfg, each.name) for each in dataclasses.fields(cfg)})


def pickled(cfg):
    file = io.BytesIO()
    torch.save(cfg, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("copied", "how"),
    [
        (dataclasses.replace, {}),
        (field_by_field, {"scheme": "sandwich_depth:exponent=0.25", "keep_scaled_init": True}),
        (copy.deepcopy, {"scheme": "sandwich"}),
        (pickled, {"keep_scaled_init": True}),
    ],
)
def test_a_copy_of_a_config_has_the_scheme_and_the_initialization(copied, how):
    cfg = tiny.config()
    if copied is pickled:  # functions of torch, since Megatron's initializers are closures
        cfg.init_method, cfg.output_layer_init_method = torch.nn.init.zeros_, torch.nn.init.ones_
    apply(cfg, **how)
    other = copied(cfg)
    assert Settings.of(other) == Settings.of(cfg) and Settings.of(other).active
    assert isinstance(other, type(tiny.config()))
    assert (other.output_layer_init_method is other.init_method) is not how.get("keep_scaled_init", False)
    norm_sites.check(tiny.build(other), parse(how.get("scheme", "lns")), tiny.LAYERS)


def block_spec(cfg):
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock

    return ModuleSpec(module=TransformerBlock, submodules=tiny.spec_with(cfg))


@pytest.mark.parametrize(
    ("own", "how"),
    [
        (lambda cfg: None, {}),
        (tiny.local_spec, {}),
        (lambda cfg: tiny.local_spec, {}),
        (lambda cfg: tiny.spec_with, {}),
        (block_spec, {}),
        (tiny.local_spec, {"scheme": "sandwich", "keep_scaled_init": True}),
    ],
    ids=["Megatron's own", "a layer", "a function", "a block", "a block's own spec", "another scheme"],
)
def test_a_layer_spec_builds_the_same_model_as_apply(own, how):
    cfg, other = tiny.config(), tiny.under(**how)
    one, two = tiny.build(cfg, layer_spec(cfg, own(cfg), **how)), tiny.build(other)
    assert (cfg.output_layer_init_method is cfg.init_method) is not how.get("keep_scaled_init", False)
    assert Settings.of(cfg) == Settings.of(other)
    norm_sites.check(one, parse(how.get("scheme", "lns")), tiny.LAYERS)
    assert type(one.decoder.layers[0]).__name__ == "TransformerLayer"
    tiny.assert_same_step(one, two)  # their initial weights are equal too


def test_a_layer_spec_refuses_a_second_scheme_and_other_specs_and_passes_the_stage_on():
    from megatron.core.transformer.spec_utils import ModuleSpec

    cfg = tiny.under("sandwich", keep_scaled_init=True)
    with pytest.raises(LNSConfigError, match=r"has sandwich already \(upstream initialization\): lns .plain. was"):
        layer_spec(cfg)
    with pytest.raises(LNSConfigError, match="'Linear' is not the spec of a TransformerLayer"):
        layer_spec(tiny.config(), ModuleSpec(module=torch.nn.Linear))
    stages = []
    layer_spec(cfg := tiny.config(), lambda cfg, vp_stage: stages.append(vp_stage) or tiny.local_spec(cfg), vp_stage=1)
    assert stages == [1]


#: Runs in a process where no function of Megatron is replaced.
UNPATCHED = """
from support import megatron_tiny as tiny
from support.megatron_cpu import single_process
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron import layer_spec
from olmo_lns.integrations.patching import is_patched
from olmo_lns.schemes import parse
with single_process():
    from megatron.core.transformer.transformer_layer import TransformerLayer
    cfg = tiny.config(init_method_std=0.2)
    finished, cfg.init_method = cfg.init_method, None  # as in Megatron Bridge, which finishes its configs later
    spec = layer_spec(cfg, tiny.local_spec(cfg))
    cfg.init_method = finished
    model = tiny.build(cfg, spec)
    assert not is_patched(TransformerLayer.__init__)
    norm_sites.check(model, parse("lns"), tiny.LAYERS)
    plain = tiny.config(init_method_std=0.2)
    plain.output_layer_init_method = plain.init_method
    tiny.assert_same_step(model, tiny.hook_reference(tiny.build(plain)))
    mtp = tiny.config(mtp_num_layers=1)
    try:
        tiny.build(mtp, layer_spec(mtp, tiny.local_spec(mtp)))
    except LNSConfigError as error:
        print("EQUAL", error)
"""


def test_a_layer_spec_works_while_no_function_of_megatron_is_replaced():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNPATCHED], cwd=TESTS, capture_output=True, text=True, timeout=300,
        env=os.environ | {"OLMO_LNS_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
    )  # fmt: skip
    assert "EQUAL MTP layers under a layer spec need the plugin" in done.stdout, done.stderr[-3000:]


def save(folder, model, **state):
    """Save the model alone with Megatron Core, as a training loop of one's own does."""
    from megatron.core import dist_checkpointing

    folder.mkdir()
    content = {"model": model.sharded_state_dict(), **state}
    before = set(content)
    dist_checkpointing.save(content, str(folder))
    assert set(content) == before
    return str(folder)


def load(folder, model):
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
    model.load_state_dict(loaded["model"])
    assert loaded.keys() == {"model"}
    return loaded


def record_in(folder):
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(folder)
    return None if metadata is None else Record.from_dict(metadata["olmo_lns"])


@pytest.mark.parametrize("scheme", ["lns:exponent=0.25", "lnsafterbranch", "sandwich"])
def test_a_checkpoint_of_ones_own_loop_has_a_record_and_is_not_loaded_as_preln(scheme, tmp_path):
    from megatron.core import dist_checkpointing

    folder = save(tmp_path / "run", tiny.model_of(scheme))
    assert record_in(folder) == Record(parse(scheme), scaled_init="plain")
    load(folder, tiny.model_of(scheme))
    load(folder, tiny.model_of(scheme, keep_scaled_init=True))  # the weights come from the checkpoint
    one = tiny.build(tiny.config()).sharded_state_dict()["decoder.final_layernorm.weight"]
    with pytest.raises(CheckpointMismatchError, match=f"was saved with {scheme}.*but this run has Pre-LN"):
        dist_checkpointing.load({"model": one}, folder)


def test_a_checkpoint_of_another_scheme_is_refused_unless_allowed(tmp_path, monkeypatch):
    lns, stock = save(tmp_path / "lns", tiny.model_of()), save(tmp_path / "stock", tiny.build(tiny.config()))
    with pytest.raises(CheckpointMismatchError, match=r"lns was saved with lns:exponent=0.5 .*this run has Pre-LN"):
        load(lns, tiny.build(tiny.config()))
    with pytest.raises(CheckpointMismatchError, match="exponent=0.5 .* this run has lns:exponent=1"):
        load(lns, tiny.model_of("lns:exponent=1"))
    with pytest.raises(CheckpointMismatchError, match="holds neither Megatron's arguments nor a record"):
        load(stock, tiny.model_of())
    load(stock, tiny.build(tiny.config()))
    assert record_in(stock) is None  # a stock checkpoint has no record
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "missing-record,lns-to-preln")
    load(stock, tiny.model_of())
    load(lns, tiny.build(tiny.config()))


def test_the_record_is_that_of_the_built_model(tmp_path):
    """A later change of the config does not count. A stage without a layer has the record of its config."""
    from megatron.core import dist_checkpointing

    model = tiny.build(cfg := tiny.under())
    Settings().store(cfg)
    folder = save(tmp_path / "run", model)
    with pytest.raises(CheckpointMismatchError, match="was saved with lns"):
        load(folder, tiny.build(tiny.config()))
    apply(built := tiny.build(tiny.config()))
    load(folder, built)
    stage = tiny.model_of("lnsafterff")
    del stage.decoder.layers[:]
    tower = tiny.build(tiny.config()).sharded_state_dict(prefix="tower.")  # Pre-LN, as a vision tower is
    found = record_in(save(tmp_path / "stage", stage, tower=tower))
    assert found is not None and found.scheme == parse("lnsafterff")
    both = {str(p): tiny.model_of(f"lns:exponent={p}").sharded_state_dict(prefix=f"{p}.") for p in (0.25, 0.5)}
    with pytest.raises(LNSConfigError, match=r"one checkpoint with lns:exponent=0.25 .* and lns:exponent=0.5"):
        dist_checkpointing.save(both, str(tmp_path))


def test_the_arguments_of_a_launch_are_compared_and_no_second_record_is_written(tmp_path):
    """Megatron Bridge reads a checkpoint of ``pretrain_gpt.py --layernorm-scaling`` in this way."""
    from megatron.core import dist_checkpointing
    from support.megatron_checkpoints import arguments

    cfg = tiny.under()
    folder = save(tmp_path / "run", tiny.build(cfg), args=arguments(cfg, layernorm_scaling=True))
    assert record_in(folder) is None
    load = dist_checkpointing.load
    assert load({"model": tiny.model_of().sharded_state_dict()}, folder)["args"].layernorm_scaling
    with pytest.raises(CheckpointMismatchError, match=r"was saved with lns.*but this run has Pre-LN"):
        load({"model": tiny.build(tiny.config()).sharded_state_dict()}, folder)


def test_a_checkpoint_can_be_read_without_a_model(tmp_path):
    """Tools that convert or average weights name tensors, and build no model that could be compared."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    folder, name = save(tmp_path / "run", tiny.model_of()), "decoder.final_layernorm.weight"
    own = ShardedTensor.from_rank_offsets(name, torch.zeros(tiny.HIDDEN))
    assert torch.equal(dist_checkpointing.load({name: own}, folder)[name], torch.ones(tiny.HIDDEN))
    assert set(dist_checkpointing.load_plain_tensors(folder)) >= {name}
    assert dist_checkpointing.load_common_state_dict(folder) is not None
