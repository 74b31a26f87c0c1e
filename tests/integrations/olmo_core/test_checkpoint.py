"""OLMo-core's own functions for saving and loading, under the guards: what they write, refuse and allow."""

import copy
import json

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.distributed.checkpoint import (
    async_save_model_and_optim_state,
    load_model_and_optim_state,
    save_model_and_optim_state,
)
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode
from olmo_core.optim import AdamWConfig
from olmo_core.testing import run_distributed_test
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerTrainModuleConfig
from support import olmo_core_models as small
from support import olmo_core_ranks

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites, patching
from olmo_lns.integrations.olmo_core import upstream
from olmo_lns.integrations.olmo_core.blocks import record_of, routers_of
from olmo_lns.integrations.olmo_core.checkpoint import saved_record, saved_routers
from olmo_lns.integrations.olmo_core.config import from_config
from olmo_lns.olmo_core import apply
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme


def _train_module(made):
    settings = TransformerTrainModuleConfig(
        rank_microbatch_size=48, max_sequence_length=12, optim=AdamWConfig(lr=1e-3), z_loss_multiplier=None
    )
    return settings.build(made.build(init_device="meta"), device=torch.device("cpu"))


def _save(tmp_path, made, *, config=True, record=True):
    checkpointer, folder = Checkpointer(work_dir=tmp_path / "work"), tmp_path / "step1"
    checkpointer.save(folder, _train_module(made), {"step": 1})
    if config:  # as ConfigSaverCallback does after every save
        checkpointer.write_file(folder, "config.json", json.dumps({"model": made.as_config_dict()}))
    if not record:
        (folder / "lns.json").unlink(missing_ok=True)
    return checkpointer, folder


def test_olmo_lns_has_wrapped_every_function_that_it_names():
    assert [target.path for target in upstream.TARGETS if not patching.is_patched(target.locate()[2])] == []


def test_a_save_writes_the_record_and_a_damaged_record_is_refused(tmp_path):
    _, folder = _save(tmp_path, apply(small.config(), exponent=0.25), config=False)
    assert Record.read(folder) == Record(Scheme.of("lns", exponent=0.25), "rms", "plain")
    assert Checkpointer.dir_is_checkpoint(folder)
    (folder / "lns.json").write_text("{")
    with pytest.raises(CheckpointMismatchError, match="lns.json: not valid JSON"):
        saved_record(folder)


def test_a_stock_checkpoint_has_no_file_of_ours_and_loads(tmp_path):
    checkpointer, folder = _save(tmp_path, small.config(), config=False)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata.json", "model_and_optim", "train"]
    assert checkpointer.load(folder, _train_module(small.config()))["step"] == 1


@pytest.mark.parametrize("record", [True, False])
def test_a_run_resumes_only_under_the_scheme_of_its_checkpoint(record, tmp_path, monkeypatch):
    made = {"preln": small.config(), "lns": apply(small.config()), "other": apply(small.config(), exponent=0.25)}
    saved = {name: _save(tmp_path / name, config, record=record) for name, config in made.items() if name != "other"}
    flags = (
        "The checkpoint's setting is:\n--model.block._CLASS_=olmo_lns.olmo_core.BlockConfig --model.block.scheme=lns$"
    )
    for was, now, message in (
        ("lns", "preln", f"(?s)would run without the scheme it was trained with.*{flags}"),
        ("preln", "lns", "preln-to-lns"),
        ("lns", "other", "every block would run with another exponent"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            saved[was][0].load(saved[was][1], _train_module(made[now]))
    saved["lns"][0].load(saved["lns"][1], _train_module(made["lns"]))
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "preln-to-lns")
    saved["preln"][0].load(saved["preln"][1], _train_module(made["lns"]))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_weights_saved_without_a_trainer_keep_their_record(asynchronous, tmp_path, monkeypatch):
    folder = tmp_path / "step1" / "model_and_optim"
    if asynchronous:
        async_save_model_and_optim_state(folder, apply(small.config()).build()).result()
    else:
        save_model_and_optim_state(folder, apply(small.config()).build())
    with pytest.raises(CheckpointMismatchError, match="lns-to-preln"):
        load_model_and_optim_state(folder, small.config().build())
    load_model_and_optim_state(folder, apply(small.config()).build())
    for named in (folder, folder.parent):  # a trainer starts from either
        checkpointer = Checkpointer(work_dir=tmp_path / "work")
        with pytest.raises(CheckpointMismatchError, match="lns-to-preln"):
            checkpointer.load(named, _train_module(small.config()), load_optim_state=False)
        checkpointer.load(named, _train_module(apply(small.config())), load_optim_state=False)
    save_model_and_optim_state(folder, small.config().build(), save_overwrite=True)
    load_model_and_optim_state(folder, small.config().build())
    with pytest.raises(CheckpointMismatchError, match="neither lns.json nor config.json: .* is unknown"):
        load_model_and_optim_state(folder, apply(small.config()).build())
    for allowed in ("missing-record", "preln-to-lns"):
        monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", allowed)
        load_model_and_optim_state(folder, apply(small.config()).build())


def test_a_model_whose_blocks_were_exchanged_is_not_saved(tmp_path):
    """A reload would give the weights of each block the factor of the other."""
    built = small.model(apply(small.config()))
    built.blocks["1"], built.blocks["3"] = built.blocks["3"], built.blocks["1"]
    with pytest.raises(UpstreamChangedError, match="block 2 was built as block 4"):
        save_model_and_optim_state(tmp_path / "a", built)
    assert not (tmp_path / "a").exists()


def test_a_model_with_a_stock_block_is_neither_loaded_nor_saved(tmp_path):
    """The build does not notice that the last block is stock, nor that a block was replaced later."""
    whole, made = apply(small.config()), apply(small.config())
    save_model_and_optim_state(tmp_path / "weights", whole.build())
    made.block_overrides = {small.LAYERS - 1: small.config().block}
    swapped = whole.build()
    swapped.blocks["1"] = small.config().build().blocks["1"]
    for model, words in ((made.build(), r"blocks \[3\] of 4"), (swapped, r"blocks \[1\] .* OLMo-core's own")):
        for act in (load_model_and_optim_state, save_model_and_optim_state):
            with pytest.raises(LNSConfigError, match=words):
                act(tmp_path / ("weights" if act is load_model_and_optim_state else "out"), model)
    assert not (tmp_path / "out").exists()


def test_folded_weights_that_are_trained_on_stay_folded_in_the_record(tmp_path):
    """Otherwise ``export --unfold`` would take them for a model that never had LNS."""
    checkpointer, folder = _save(tmp_path, small.config())
    folded = Record(Scheme.of("lns"), "rms", "plain", folded=True)
    folded.write(folder)
    model = _train_module(small.config())
    checkpointer.load(folder, model)
    checkpointer.save(tmp_path / "step2", model, {"step": 2})
    save_model_and_optim_state(tmp_path / "weights", model.model)
    assert Record.read(tmp_path / "step2") == Record.read(tmp_path / "weights") == folded
    (folder / "lns.json").unlink()
    checkpointer.load(folder, model)
    checkpointer.save(tmp_path / "step3", model, {"step": 3})
    assert Record.read(tmp_path / "step3") is None


@pytest.fixture
def converted(tmp_path):
    """A config that OLMo-core's converter accepts; a stock Hugging Face model and one under a scheme, in a folder."""
    transformers = pytest.importorskip("transformers")
    from olmo_core.nn.hf import save_hf_model

    from olmo_lns.integrations.transformers import apply as apply_hf

    made = small.config("reordered_norm", qk_norm=True)
    stock = small.model(made)
    save_hf_model(tmp_path / "stock", stock.state_dict(), stock)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    apply_hf(model, "branchln_depth", trained=True).save_pretrained(tmp_path / "ours")
    return made, tmp_path


def test_the_converter_to_hugging_face_is_refused_where_it_would_drop_the_factor(converted, monkeypatch):
    from olmo_core.nn.hf import save_hf_model

    made, folder = converted
    for config in (made, small.config()):
        built = small.model(small.with_scheme(config))
        with pytest.raises(CheckpointMismatchError, match="OLMo-core's converter drops the factor.*olmo-lns export"):
            save_hf_model(folder / "hf", built.state_dict(), built)
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "branchln_depth-to-preln")
    built = small.model(small.with_scheme(made))
    save_hf_model(folder / "hf", built.state_dict(), built)


def test_the_converter_from_hugging_face_is_refused_where_the_schemes_differ(converted, monkeypatch):
    import transformers
    from olmo_core.nn.hf import load_hf_model

    made, folder = converted
    load_hf_model(folder / "stock", state := made.build().state_dict())
    made.build().load_state_dict(state)
    scaled = small.with_scheme(made).build()
    for model in (scaled, copy.deepcopy(scaled)):
        with pytest.raises(
            CheckpointMismatchError, match="what load_hf_model read was saved with .*=preln-to-branchln"
        ):
            model.load_state_dict(state)
    scaled.load_state_dict(scaled.state_dict())
    with pytest.raises(CheckpointMismatchError, match="(?s)knows no factor.*=branchln_depth-to-preln.*olmo-lns export"):
        load_hf_model(folder / "ours", {})
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "branchln_depth-to-preln")
    load_hf_model(folder / "ours", state := made.build().state_dict())
    scaled.load_state_dict(state)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours")(small.TOKENS).logits
        torch.testing.assert_close(scaled(small.TOKENS), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointMismatchError, match="another exponent"):
        small.with_scheme(made, exponent=0.25).build().load_state_dict(state)


@pytest.mark.parametrize("block", small.SCHEMES)
def test_every_sub_layer_is_a_site_and_the_records_of_config_and_model_agree(block):
    scheme, norms = small.SCHEMES[block]
    made = small.with_scheme(small.config(block), exponent=0.25)
    expected = Record(Scheme.of(scheme, exponent=0.25), "rms", "plain")
    assert from_config({"model": made.as_config_dict()}, source="x") == expected
    built = made.build(init_device="meta")
    assert record_of(built) == expected and len(list(norm_sites.sites(built))) == 2 * small.LAYERS
    for number, each in enumerate(built.blocks.values(), start=1):
        assert [getattr(each, name).lns_scale for name in norms] == [number**-0.25] * len(norms)
    for name in {norms[0], norms[-1]}:
        norm = getattr(built.blocks["1"], name)
        norm.lns_scale, kept = 1.0, norm.lns_scale
        message = (
            "block 1: .* have different" if "moe_norm" in name else "block 2, (attn|ff). has (norm|branch)_scale=1.0"
        )
        with pytest.raises(UpstreamChangedError, match=message):
            record_of(built)
        norm.lns_scale = kept
    lost = made.as_config_dict() | {"block_overrides": {"1": small.config(block).block.as_config_dict()}}
    with pytest.raises(CheckpointMismatchError, match="different schemes"):
        from_config(lost, source="x")


@pytest.mark.parametrize("saved", [True, False])
def test_resuming_with_another_scale_router_is_refused(tmp_path, saved):
    made, other = (small.with_scheme(small.config("moe"), scale_router=value) for value in (saved, not saved))
    checkpointer, folder = _save(tmp_path, made)
    words = f"(?i)saved with block.scale_router={saved}, but this run has {not saved} in block 1.*Run with"
    with pytest.raises(CheckpointMismatchError, match=words):
        checkpointer.load(folder, _train_module(other))
    with pytest.raises(CheckpointMismatchError, match=words):
        load_model_and_optim_state(folder / "model_and_optim", other.build())
    checkpointer.load(folder, _train_module(made))


def test_scale_router_is_read_for_each_block_with_its_own_config(tmp_path):
    hidden, seen = (small.with_scheme(small.config("moe"), scale_router=value) for value in (False, True))
    overridden, named = copy.deepcopy(hidden), copy.deepcopy(hidden)
    overridden.block_overrides = {1: small.with_scheme(small.config()).block, 2: seen.block}
    named.block, named.block_pattern = {"seen": seen.block, "not": hidden.block}, ["seen", "not"]
    for name, made, configs, routers in (
        ("overridden", overridden, {0: False, 1: True, 2: True, 3: False}, {0: False, 2: True, 3: False}),
        ("named", named, {0: True, 1: False, 2: True, 3: False}, {0: True, 1: False, 2: True, 3: False}),
    ):
        assert saved_routers(_save(tmp_path / name, made)[1]) == configs
        built = made.build(init_device="meta")
        built.apply_activation_checkpointing(Mode.selected_modules, modules=["blocks.*.feed_forward_moe.router"])
        assert routers_of(built) == routers
    assert saved_routers(_save(tmp_path / "stock", small.config("moe"))[1]) == {}


@pytest.mark.slow
def test_two_ranks_stop_together_and_groups_of_one_rank_load_alone(tmp_path):
    run_distributed_test(olmo_core_ranks.guard, start_method="spawn", func_args=(tmp_path,))
