"""Flags: how they reach the arguments, the config and the model, and what a checkpoint restores and refuses."""

import argparse
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns import hook
from olmo_lns.environment import ALLOW_MISMATCH
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, LNSError, UpstreamChangedError
from olmo_lns.integrations.megatron import apply, checkpoint, command_line
from olmo_lns.integrations.megatron import model as megatron_model
from olmo_lns.integrations.megatron.flags import FLAGS, MegatronFlags, add_flags
from olmo_lns.schemes import parse as parse_scheme

LNS, EXPONENT, KEEP, PLAIN = FLAGS


def parse(*words, **more):
    return add_flags(argparse.ArgumentParser()).parse_args(words, argparse.Namespace(**more))


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    """The wheel has no ``megatron.training``."""
    monkeypatch.setattr(command_line, "TRAINING_MODULES", ())


@pytest.mark.parametrize(
    ("words", "scheme"),
    [((), "preln"), ((PLAIN,), "preln"), ((LNS,), "lns"), ((LNS, EXPONENT, "0.25", KEEP), "lns:exponent=0.25")],
)
def test_flags_reach_the_config_and_the_model(words, scheme):
    args, config = parse(*words), tiny.config(hidden_size=64)
    assert command_line.wrap_config_from_args(lambda args, config_class=None: config)(args) is config
    for holder in (args, config):
        assert str(MegatronFlags.of(holder).scheme) == scheme
    model = tiny.build(config)
    assert len(tiny.scaled_norms(model)) == (8 if LNS in words else 0)
    std = 0.02 if words and KEEP not in words else 0.02 / 8**0.5
    assert model.decoder.layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(std, rel=0.1)
    assert words or not hasattr(config, "layernorm_scaling")


def test_the_line_of_a_plain_baseline_is_printed_once_and_says_what_was_measured(capsys):
    for initialized in (True, False):
        config = tiny.config(perform_initialization=initialized)
        command_line.wrap_config_from_args(lambda args, config_class=None, config=config: config)(parse(PLAIN))
        tiny.build(config)
    said = "olmo-lns: scaled initialization off (output projections: init_method); measured: initialization\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((EXPONENT, "0.3"), "without --layernorm-scaling"),
        ((LNS, EXPONENT, "-1"), "finite number >= 0"),
        ((KEEP,), "without --layernorm-scaling"),
        ((KEEP, PLAIN), "contradict each other"),
    ],
)
def test_wrong_or_contradicting_flags_are_refused(words, message):
    with pytest.raises(LNSConfigError, match=message):
        MegatronFlags.of(parse(*words)).validated()


def test_the_model_that_modelopt_distils_from_stays_preln(monkeypatch):
    student = parse(LNS, export_kd_teacher_load="teacher")
    module = ModuleType("megatron.training.global_vars")
    module.get_args = lambda: student
    for name in ("megatron.training", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    make = command_line.wrap_config_from_args(lambda args: tiny.config())
    assert MegatronFlags.of(make(student)).layernorm_scaling
    assert not MegatronFlags.of(make(argparse.Namespace(**vars(student)))).layernorm_scaling


def test_a_missing_function_is_an_error_once_a_scheme_is_selected(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(hook, "_problems", {})
    hook.wrap("megatron.core.models.gpt.gpt_model:GPTModel.build_layers", megatron_model.wrap_model_init)
    assert tiny.scaled_norms(tiny.build(tiny.config())) == []
    with pytest.raises(UpstreamChangedError, match=r"GPTModel.build_layers"):
        apply(tiny.config())


def test_a_launch_needs_more_modules_than_a_script_that_builds_a_model(monkeypatch):
    monkeypatch.undo()
    make = command_line.wrap_config_from_args(lambda args: tiny.config())
    apply(make(parse()))
    with pytest.raises(UpstreamChangedError, match=r"the module megatron.training.checkpointing was not found"):
        make(parse(LNS))


@pytest.fixture
def arguments(monkeypatch):
    """The parsed command line in a stand-in for ``megatron.training``, which the wheel lacks."""
    args = SimpleNamespace(layernorm_scaling=True)
    module = ModuleType("megatron.training.global_vars")
    module.get_args = lambda: args
    for name in ("megatron.training", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    return args


def built(*chunks):
    return megatron_model.wrap_model_built(lambda: (list(chunks), "optimizer", "scheduler"))()


def test_a_flag_without_effect_is_refused(arguments, monkeypatch):
    """A config of one's own, --yaml-cfg and --use-legacy-models build models that no flag reaches."""
    built(tiny.model_of())
    layers = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    message = f"{LNS} was passed, .* Over all pipeline stages these blocks have them: none"
    for model in (tiny.build(tiny.config()), layers):
        with pytest.raises(LNSConfigError, match=message):
            built(model)
    vars(arguments).clear()
    arguments.yaml_cfg = "x.yaml"  # all that is left of the command line
    built(tiny.build(tiny.config()))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "x.yaml", PLAIN])
    with pytest.raises(LNSConfigError, match=rf"{PLAIN} was passed, .*--yaml-cfg. Pass"):
        built(tiny.build(tiny.config()))


def test_blocks_that_are_missing_or_have_another_scheme_are_refused(arguments):
    model = tiny.model_of()
    del model.decoder.layers[1]
    with pytest.raises(LNSError, match=r"Over all pipeline stages these blocks have them: \[1, 3, 4\]"):
        built(model)
    with pytest.raises(LNSError, match="built with lns:exponent=0.25"):
        built(tiny.model_of(exponent=0.25))
    model = tiny.model_of()
    model.decoder.layers[1].input_layernorm.__class__ = torch.nn.RMSNorm
    with pytest.raises(LNSError, match="expected 0.7"):
        built(model)


def test_a_scheme_that_a_provider_applies_is_in_the_arguments_of_the_checkpoint(arguments, capsys):
    """Otherwise the checkpoint would say Pre-LN, and a later launch without ``apply`` would load it as such."""
    arguments.layernorm_scaling = False
    apply(model := tiny.build(tiny.config()), exponent=0.25)
    built(model)
    assert MegatronFlags.of(arguments).scheme == parse_scheme("lns:exponent=0.25")
    assert "apply() switched LayerNorm Scaling on" in capsys.readouterr().out


def restore(running, saved):
    checkpoint.wrap_load_args(lambda args, load_arg="load": (args, saved))(running)
    return MegatronFlags.of(running)


def test_use_checkpoint_args_restores_the_flags_that_were_not_given(monkeypatch):
    saved = parse(LNS, EXPONENT, "0.75", KEEP)
    assert restore(parse(), saved) == MegatronFlags(True, 0.75, True)
    assert restore(parse(LNS, EXPONENT, "1"), saved) == MegatronFlags(True, 1.0)
    assert restore(parse(), parse(PLAIN)).no_scaled_init
    assert restore(parse(), SimpleNamespace()) == MegatronFlags()  # saved without the plugin
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt.py", f"{EXPONENT}=0.5"])
        assert restore(parse(EXPONENT, "0.5"), saved) == MegatronFlags()
    args = parse(LNS)  # no checkpoint
    assert checkpoint.wrap_load_args(lambda args, load_arg="load": args)(args) is args
    monkeypatch.setenv(ALLOW_MISMATCH, "1")
    assert restore(parse(), saved) == MegatronFlags()


def load(running, saved, folder="folder", **state):
    contents = {"args": saved, **state} if saved is not None else state

    def _load_base_checkpoint(load_dir, args, rank0=False):
        return contents, "iter_7", False, None

    return checkpoint.wrap_load_base(_load_base_checkpoint)(folder, args=running)


@pytest.mark.parametrize(
    ("running", "saved", "words"),
    [
        ((LNS,), (), r"says preln, but this run has lns.*\(without --layernorm-scaling\)"),
        ((LNS, EXPONENT, "1"), (LNS,), r"this run has lns:exponent=1.*\(--layernorm-scaling\)"),
        ((), (LNS, EXPONENT, "0.25"), r"this run has preln.*\(--layernorm-scaling --layernorm-scaling-exponent 0.25\)"),
    ],
)
def test_a_checkpoint_of_another_scheme_is_refused(running, saved, words, monkeypatch):
    with pytest.raises(CheckpointMismatchError, match=f"(?s)iter_7.*{words}"):
        load(parse(*running), parse(*saved))
    monkeypatch.setenv(ALLOW_MISMATCH, "1")
    assert load(parse(*running), parse(*saved))[1] == "iter_7"


def test_the_arguments_are_compared_when_they_are_read_first():
    """A sharded checkpoint is read twice: with rank0 its arguments alone, before the weights of the model are filled."""
    calls = []

    def _load_base_checkpoint(load_dir, args, rank0=False):
        calls.append(rank0)
        return {"args": parse(LNS)}, "iter_7", False, None

    wrapped = checkpoint.wrap_load_base(_load_base_checkpoint)
    with pytest.raises(CheckpointMismatchError, match="says lns, but this run has preln"):
        wrapped("folder", parse(), rank0=True)
    args = parse()  # which --use-checkpoint-args fills from such a call
    read = checkpoint.wrap_load_args(lambda args: (args, wrapped("folder", args, rank0=True)[0]["args"]))
    read(args)
    assert MegatronFlags.of(args) == MegatronFlags(True) and calls == [True, True]


def test_checkpoints_that_load_and_those_that_cannot(monkeypatch):
    for words in ((), (LNS,), (LNS, KEEP), (PLAIN,)):
        assert load(parse(*words), parse(*words))[1] == "iter_7"
    assert load(parse(), None, model={})[1] == "iter_7"
    with pytest.raises(CheckpointMismatchError, match="no config was found beside its weights"):
        load(parse(LNS), None, model={})
    with pytest.raises(LNSConfigError, match="norm_scheme='sandwich'"):  # of a development version
        load(parse(), SimpleNamespace(norm_scheme="sandwich"))
    teacher = parse(LNS, export_kd_teacher_load="teacher")
    assert load(teacher, parse(), folder="teacher")[1] == "iter_7"
    with pytest.raises(CheckpointMismatchError):
        load(teacher, parse())
