"""Flags: how they reach the arguments and the config, and what a checkpoint restores."""

import argparse
from types import SimpleNamespace

import pytest
from support import megatron_tiny as tiny

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.megatron import building, checkpoint
from olmo_lns.integrations.megatron.settings import FLAGS, ZERO_CENTRED, Settings, add_flags
from olmo_lns.schemes import names
from olmo_lns.schemes import parse as parse_scheme

LNS, EXPONENT, KEEP, PLAIN, SCHEME = FLAGS


def parse(*words, **more):
    return add_flags(argparse.ArgumentParser()).parse_args(words, argparse.Namespace(**more))


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        ((), "preln"),
        ((PLAIN,), "preln"),
        ((SCHEME, "preln"), "preln"),
        ((LNS,), "lns"),
        ((LNS, EXPONENT, "0.25"), "lns:exponent=0.25"),
        ((LNS, EXPONENT, "0.25", SCHEME, "lns:exponent=0.25"), "lns:exponent=0.25"),
        ((SCHEME, "sandwich_depth:exponent=0.25"), "sandwich_depth:exponent=0.25"),
        ((SCHEME, "skipinit:start=0.001", KEEP), "skipinit:start=0.001"),
    ],
)
def test_flags_reach_the_config_and_choose_the_initialization(words, scheme):
    args, config = parse(*words), tiny.config()
    make = building.config_from_args(lambda args, config_class=None: config)
    assert make(args) is config
    for holder in (args, config):
        assert str(Settings.of(holder).scheme) == scheme
    active = scheme != "preln"
    plain = PLAIN in words or (active and KEEP not in words)
    assert (config.output_layer_init_method is config.init_method) is plain
    if active:  # both flags for LayerNorm Scaling give the same arguments
        own = scheme.startswith("lns")
        assert (args.layernorm_scaling, args.norm_scheme) == (own, "" if own else scheme)
        assert args.layernorm_scaling_exponent == (0.25 if scheme == "lns:exponent=0.25" else 0.5)
    if not words:
        assert type(config) is type(tiny.config()) and not hasattr(config, "layernorm_scaling")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((LNS, SCHEME, "sandwich"), "--layernorm-scaling is short for --norm-scheme lns, but --norm-scheme sandwich"),
        ((LNS, EXPONENT, "0.3", SCHEME, "lns"), "exponent is 0.3, but --norm-scheme lns has exponent 0.5"),
        ((EXPONENT, "0.3"), "without --layernorm-scaling"),
        ((LNS, EXPONENT, "-1"), "finite number >= 0"),
        ((SCHEME, "preln", KEEP), "without --layernorm-scaling or --norm-scheme"),
        ((KEEP, PLAIN), "contradict each other"),
    ],
)
def test_wrong_or_contradicting_flags_are_refused(words, message):
    with pytest.raises(LNSConfigError, match=message):
        Settings.of(parse(*words)).check()


def restore(running, saved):
    checkpoint.load_args(lambda args, load_arg="load": (args, saved))(running)
    return running


def test_use_checkpoint_args_restores_the_flags_that_were_not_given(capsys):
    saved = parse(LNS, EXPONENT, "0.75", KEEP)
    assert Settings.of(restore(parse(), saved)) == Settings(True, 0.75, True)
    assert "from the checkpoint's arguments: --layernorm-scaling --layernorm-scaling-exponent 0.75 " + KEEP in (
        capsys.readouterr().out
    )
    assert Settings.of(restore(parse(LNS), saved)) == Settings(True, 0.75, True)
    assert Settings.of(restore(parse(), parse(PLAIN))).no_scaled_init
    saved = parse(SCHEME, "sandwich_depth:exponent=0.75", KEEP)
    assert Settings.of(restore(parse(), saved)) == Settings(False, 0.5, True, False, "sandwich_depth:exponent=0.75")
    assert Settings.of(restore(parse(), SimpleNamespace())) == Settings()  # saved without the plugin
    args = parse(LNS)  # no checkpoint
    assert checkpoint.load_args(lambda args, load_arg="load": args)(args) is args


def load(running, saved, **state):
    contents = {"args": saved, **state} if saved is not None else state
    base = checkpoint.load_base(lambda load_dir, args, rank0: (contents, "iter_7", False, None))
    return base("folder", running)


@pytest.mark.parametrize("way", [restore, load])
@pytest.mark.parametrize(
    ("running", "saved", "words"),
    [
        ((LNS,), (), r"saved with Pre-LN .* this run has lns:exponent=0.5"),
        ((LNS, EXPONENT, "1"), (LNS,), r"exponent=0.5.* this run has lns:exponent=1.*is:\n--layernorm-scaling$"),
        ((SCHEME, "preln"), (SCHEME, "sandwich"), r"saved with sandwich .* Pre-LN.*is:\n--norm-scheme sandwich$"),
        ((LNS,), (SCHEME, "lnsafterff"), r"saved with lnsafterff:exponent=0.5 .* this run has lns:exponent=0.5"),
        ((SCHEME, "lnsafterbranch"), (), "saved with Pre-LN .* but this run has lnsafterbranch:exponent=0.5"),
    ],
)
def test_a_given_flag_that_differs_from_the_checkpoint_is_refused(way, running, saved, words):
    with pytest.raises(CheckpointMismatchError, match=f"(?s){words}"):
        way(parse(*running), parse(*saved))


@pytest.mark.parametrize("name", [name for name in names() if parse_scheme(name).stock_keys(4) and name != "preln"])
def test_weights_of_a_scheme_with_the_keys_of_preln_are_not_loaded_as_preln(name):
    """They have the names and shapes of Pre-LN. Megatron builds some of these schemes, and may be given any."""
    for finetune in (False, True):
        with pytest.raises(CheckpointMismatchError, match=f"iter_7 was saved with {name}"):
            load(parse(finetune=finetune), SimpleNamespace(norm_scheme=name))


def test_the_same_settings_load():
    for words in ((), (LNS,), (LNS, KEEP), (PLAIN,), (SCHEME, "sandwich")):
        assert load(parse(*words), parse(*words))[1] == "iter_7"


@pytest.mark.parametrize("name", ZERO_CENTRED)
def test_plain_and_zero_centred_gains_are_not_taken_for_each_other(name):
    plain, centred = (parse(LNS, **{name: value}) for value in (False, True))
    with pytest.raises(CheckpointMismatchError, match=r"holds plain gains, .*: drop --apply-layernorm-1p"):
        load(centred, plain)
    with pytest.raises(CheckpointMismatchError, match=r"holds zero-centred gains .*: add --apply-layernorm-1p"):
        load(plain, centred)


@pytest.mark.parametrize("more", [{}, {"finetune": True}, {"skip_train": True}])
def test_folded_weights_run_as_preln_and_are_not_scaled_again(more, capsys):
    """``export`` tells its users to run them so."""
    folded = SimpleNamespace(layernorm_scaling=False, layernorm_scaling_exponent=0.5, layernorm_scaling_folded=True)
    assert load(parse(**more), folded)[1] == "iter_7"
    assert not Settings.of(restore(parse(**more), folded)).layernorm_scaling
    assert "folded into its weights: under Pre-LN they are a stock model's" in capsys.readouterr().out
    with pytest.raises(CheckpointMismatchError, match="applied twice"):
        load(parse(LNS, **more), folded)


def test_an_allowed_mismatch_and_a_checkpoint_without_arguments_are_reported(monkeypatch, capsys):
    load(parse(LNS), None, model={})
    assert "holds no arguments" in capsys.readouterr().out
    monkeypatch.setenv(environment.ALLOW_MISMATCH, "lns-to-preln")
    load(parse(), parse(LNS))
    assert "in spite of lns-to-preln" in capsys.readouterr().out
    assert not Settings.of(restore(parse(), parse(LNS))).layernorm_scaling
