"""Checkpoints that Megatron Core itself wrote are folded, converted to transformers or refused, under every scheme."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from support import megatron_tiny as tiny
from support.exports import Hostile, export, load_hf, refused, relative
from support.megatron_checkpoints import (
    TOKENS,
    arguments,
    as_core_0_19,
    copy_with,
    export_in_process,
    load,
    perturbed,
    run,
    save,
    under_lns,
)
from support.megatron_cpu import single_process

from olmo_lns.checkpoints.megatron import Absent, MegatronCheckpoint
from olmo_lns.cli import main
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.export.megatron import Megatron
from olmo_lns.export.sources import Options
from olmo_lns.integrations.megatron import apply, register
from olmo_lns.integrations.megatron.checkpoint import load_base
from olmo_lns.integrations.megatron.settings import ZERO_CENTRED
from olmo_lns.schemes import definition, names, parse

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("psutil", reason="megatron-core writes checkpoints only with psutil")


@pytest.fixture(scope="module", autouse=True)
def one_process():
    register()
    with single_process():
        yield


#: Name -> changes of the config, whether layers are stacked, whether the folder gets the layout of Core 0.19.
CASES = {
    "stacked": ({}, True, False),
    "numbered_gqa": ({"num_query_groups": 2}, False, False),
    "core_0_19": ({}, True, True),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(checkpoint, its folded export, config, logits of the model whose factor hooks apply)."""
    changes, stacked, newer = CASES[request.param]
    config = tiny.config(**changes)
    model = perturbed(config)
    root = save(tmp_path_factory.mktemp(request.param) / "run", model, arguments(config), stacked)
    if newer:
        as_core_0_19(root)
    folded = root.with_name("folded")
    assert export(root, folded, "--format", "megatron") == 0
    return root, folded, config, run(tiny.hook_reference(model))


def test_a_fold_runs_in_stock_megatron_and_is_unfolded_again(case):
    root, folded, config, expected = case
    assert relative(run(load(folded, tiny.build(config))), expected) <= 1e-5
    with pytest.raises(CheckpointMismatchError, match="was saved with lns"):
        load(root, tiny.build(config))
    opened = MegatronCheckpoint.open(folded)
    args = opened.args
    said = (args.layernorm_scaling, args.layernorm_scaling_folded, args.layernorm_scaling_exponent)
    assert said == (False, True, 0.5)
    assert not any("optimizer" in name for name in opened.state.metadata.state_dict_metadata)
    with pytest.raises(LNSConfigError, match="folded already"):
        export_in_process(folded, root.with_name("again"))
    assert export(folded, root.with_name("unfolded"), "--format", "megatron", "--unfold") == 0
    assert relative(run(load(root.with_name("unfolded"), under_lns(config))), expected) <= 1e-5
    args = MegatronCheckpoint.open(root.with_name("unfolded")).args
    assert args.layernorm_scaling and not args.layernorm_scaling_folded


def test_transformers_runs_the_fold_and_our_class_the_checkpoint(case, capsys):
    """A stock Llama runs the fold; our class, for more training, is made of the checkpoint and of its fold."""
    root, folded, _, expected = case
    assert export(root, root.with_name("hf"), "--format", "hf") == 0
    assert main(["verify", str(root), str(root.with_name("hf")), "--length", "16"]) == 0
    assert "PASS" in capsys.readouterr().out
    models = {"hf": "LlamaForCausalLM"}
    for source, said in ((root, "as trained"), (folded, "unfolded: the factors are outside again")):
        assert main(["hf", "import", str(source), "-o", str(root.with_name(f"lns-{source.name}"))]) == 0
        assert said in capsys.readouterr().out
        models[f"lns-{source.name}"] = "LNSLlamaForCausalLM"
    for name, kind in models.items():
        model = load_hf(root.with_name(name))
        assert type(model).__name__ == kind
        with torch.no_grad():
            assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
    assert model.model.layers[1].input_layernorm.lns_scale == pytest.approx(2**-0.5)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    config = tiny.config()
    return save(tmp_path_factory.mktemp("plain") / "run", perturbed(config), arguments(config))


def test_a_mixture_of_experts_is_folded_as_a_megatron_checkpoint(tmp_path):
    config = tiny.config(num_moe_experts=4)
    model = perturbed(config)
    root = save(tmp_path / "run", model, arguments(config, num_experts=4), stacked=False)
    expected = run(tiny.hook_reference(model))
    assert export(root, tmp_path / "folded", "--format", "megatron") == 0
    assert relative(run(load(tmp_path / "folded", tiny.build(config))), expected) <= 1e-5
    assert relative(run(load(root, under_lns(config))), expected) <= 1e-5


@pytest.mark.parametrize("version", ["0.15", "0.16", "0.20"])
def test_zero_centred_gains_become_plain(tmp_path, version, monkeypatch):
    """The file holds gain - 1; the export holds s·gain, and the argument is off, whatever the version calls it."""
    config = tiny.config()
    plain = perturbed(config)
    expected = run(tiny.hook_reference(plain))
    centred = perturbed(config)
    with torch.no_grad():
        for name, parameter in centred.named_parameters():
            if "norm" in name:
                parameter.sub_(1)
    args = arguments(config, "zero_centred", version)
    root = save(tmp_path / "run", centred, args)
    assert export(root, tmp_path / "folded", "--format", "megatron") == 0
    written = vars(MegatronCheckpoint.open(tmp_path / "folded").args)
    assert written.keys() - vars(args).keys() == {"layernorm_scaling_folded"}
    assert not any(written[name] for name in ZERO_CENTRED if name in written)
    assert relative(run(load(tmp_path / "folded", tiny.build(config))), expected) <= 1e-5
    assert export(root, tmp_path / "hf", "--format", "hf") == 0
    with torch.no_grad():
        assert relative(load_hf(tmp_path / "hf")(TOKENS).logits.double(), expected) <= 1e-5
    assert export(tmp_path / "folded", tmp_path / "again", "--format", "megatron", "--unfold") == 0
    assert relative(run(load(tmp_path / "again", under_lns(config))), expected) <= 1e-5
    # The run's script still passes --apply-layernorm-1p, and under --finetune Megatron compares no arguments.
    words = "holds plain gains, but this run reads zero-centred gains .*: drop --apply-layernorm-1p"
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "folded-to-preln,lns-to-preln,missing-record")
    for folder in ("folded", "again"):
        state = MegatronCheckpoint.open(tmp_path / folder).common
        with pytest.raises(CheckpointMismatchError, match=words):
            load_base(lambda *_, state=state: (state, "iter"))("load", Namespace(**vars(args), finetune=True))
        model = tiny.build(replace(config))
        model.config.layernorm_zero_centered_gamma = True
        with pytest.raises(CheckpointMismatchError, match=words):
            load(tmp_path / folder, model)


def argument(**changes):
    return lambda common: vars(common["args"]).update(changes)


#: Name -> the change of the common state, the format asked for, part of the message.
REFUSED = {
    "q/k norms": (argument(qk_layernorm=True), "hf", "qk_layernorm=True"),
    "channels": (argument(kv_channels=99), "hf", "kv_channels=99"),
    "exponent": (argument(layernorm_scaling_exponent=1e9), "megatron", "exponent must be at most 8"),  # s is 0
    "no arguments": (lambda common: common.pop("args"), "megatron", "holds no arguments"),
    "hostile": (lambda common: common.update(extra=Hostile()), "megatron", "names the class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_cannot_be_exported_is_refused(run_folder, tmp_path, name, capsys):
    change, form, reason = REFUSED[name]
    assert reason in refused(
        capsys, copy_with(run_folder, tmp_path / "run", change), tmp_path / "out", "--format", form
    )


def test_a_value_of_a_missing_megatron_class_is_not_written(run_folder, tmp_path):
    """Where Megatron Core is not installed, a placeholder stands for a value of its classes."""
    checkpoint = MegatronCheckpoint.open(run_folder)
    checkpoint.args.attention_backend = Absent(5)
    with pytest.raises(LNSConfigError, match="the saved argument attention_backend is of a class of Megatron Core's"):
        Megatron().folded(checkpoint, Options(str(tmp_path / "out"))).write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_refusal_of_an_fsdp_dtensor_checkpoint_names_its_format(tmp_path, capsys):
    """Megatron writes fsdp_dtensor and torch_dcp with torch's own writer."""
    from torch.distributed import checkpoint as dcp

    folder = tmp_path / "run" / "iter_0000010"
    dcp.save({"args": arguments(tiny.config()), "model": {"w": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    for place in (folder, folder.parent):
        line = refused(capsys, place, tmp_path / "out", "--format", "megatron")
        assert "torch_dcp or fsdp_dtensor format" in line and "--ckpt-format torch_dist" in line


# --- other schemes --------------------------------------------------------------------------------

FOLDED = ("lnsafterbranch:exponent=0.75", "lnsafterattn", "layerscale:start=0.5", "skipinit")
#: Scheme -> whether its checkpoint stacks the layers; the others do.
STACKED = {"skipinit": False, "lnsafterattn": False}
STOCK_KEYS = [
    name
    for name in names()
    if name not in ("preln", "lns") and parse(name).stock_keys(4) and not definition(name).olmo_only
]


def under_scheme(folder, scheme):
    """(checkpoint, stock config, logits of the model under its scheme)."""
    config = tiny.config()
    apply(config, scheme=scheme)
    model = perturbed(config)
    args = arguments(config, layernorm_scaling=False, norm_scheme=scheme)
    return save(folder / "run", model, args, STACKED.get(scheme, True)), tiny.config(), run(model)


@pytest.mark.parametrize("scheme", FOLDED)
def test_constants_and_gates_fold_into_stock_megatron_and_llama(scheme, tmp_path, capsys):
    root, config, expected = under_scheme(tmp_path, scheme)
    out, hf = tmp_path / "folded", tmp_path / "hf"
    assert export(root, out, "--format", "megatron") == 0
    assert relative(run(load(out, tiny.build(config))), expected) <= 1e-5
    folded = MegatronCheckpoint.open(out)
    assert not [name for name in folded.names if "_bda" in name]
    assert (str(folded.record.scheme), folded.record.folded) == (scheme, True)
    with pytest.raises(LNSConfigError, match="folded already"):
        export_in_process(out, tmp_path / "again")
    for source, target in ((root, hf), (out, tmp_path / "hf-2")):
        assert export(source, target, "--format", "hf") == 0
        model = load_hf(target)
        assert type(model).__name__ == "LlamaForCausalLM"
        with torch.no_grad():
            assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
        assert main(["verify", str(source), str(target), "--length", "16"]) == 0
        assert "PASS" in capsys.readouterr().out
    wrong = tmp_path / "wrong"  # verify sees a factor that is missing
    assert export(*under_scheme(tmp_path / "stock", "lnsafterff:exponent=0.0")[:1], wrong, "--format", "hf") == 0
    assert main(["verify", str(root), str(wrong), "--length", "16"]) == 1
    for source in (root, out):  # our transformers integration has only some schemes
        code = main(["hf", "import", str(source), "-o", str(tmp_path / f"lns-{source.name}")])
        if not scheme.startswith("lnsafter"):
            assert code == 1 and "would need another form of the block" in capsys.readouterr().err
            continue
        model = load_hf(tmp_path / f"lns-{source.name}")
        assert code == 0 and type(model).__name__ == "LNSLlamaForCausalLM"
        with torch.no_grad():
            assert relative(model(TOKENS).logits.double(), expected) <= 1e-5


@pytest.mark.parametrize("scheme", ["sandwich", "sandwich_depth"])
def test_a_sandwich_model_exports_as_a_stock_gemma_2(scheme, tmp_path, capsys):
    root, _, expected = under_scheme(tmp_path, scheme)
    assert export(root, tmp_path / "hf", "--format", "hf") == 0
    model = load_hf(tmp_path / "hf")
    assert type(model).__name__ == "Gemma2ForCausalLM"
    with torch.no_grad():
        assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
    assert main(["verify", str(root), str(tmp_path / "hf"), "--length", "16"]) == 0
    assert "PASS" in capsys.readouterr().out
    with pytest.raises(LNSConfigError, match="cannot be folded into a stock model: it normalises the branches"):
        export_in_process(root, tmp_path / "folded")


@pytest.mark.parametrize("scheme", STOCK_KEYS)
def test_stock_weight_names_are_not_taken_for_pre_ln(scheme, tmp_path, capsys):
    """Only the saved arguments tell these weights from a Pre-LN model's."""
    config = tiny.config()
    args = arguments(config, layernorm_scaling=False, norm_scheme=scheme)
    root = save(tmp_path / "run", perturbed(config), args)
    for kind in ("hf", "megatron"):
        code = export(root, tmp_path / kind, "--format", kind)
        if parse(scheme).folds_into_pre_ln(4):
            assert code == 0
        else:
            assert code != 0 and f"({scheme}) cannot be folded" in capsys.readouterr().err


def test_a_mixture_of_experts_is_not_folded_under_another_scheme(tmp_path):
    config = tiny.config(num_moe_experts=4)
    apply(config, scheme="lnsafterbranch")
    args = arguments(config, "experts", layernorm_scaling=False, norm_scheme="lnsafterbranch")
    root = save(tmp_path / "run", perturbed(config), args)
    with pytest.raises(LNSConfigError, match="not folded into a mixture of experts"):
        export_in_process(root, tmp_path / "out")
