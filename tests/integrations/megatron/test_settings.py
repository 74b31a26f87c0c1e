"""Flags, their way through args and config, and what a checkpoint restores."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.megatron import checkpoint, launching
from olmo_lns.integrations.megatron.settings import FLAGS, Settings, add_flags
from olmo_lns.schemes import names
from olmo_lns.schemes import parse as parse_scheme


def parse(*words: str) -> argparse.Namespace:
    return add_flags(argparse.ArgumentParser()).parse_args(words)


def test_nothing_is_on_by_default() -> None:
    assert Settings.of(parse()) == Settings()
    assert not Settings().scaled_init_off


def test_all_flags() -> None:
    args = parse(FLAGS[0], FLAGS[1], "0.25", FLAGS[2])
    assert Settings.of(args) == Settings(True, 0.25, True, False)
    assert Settings.of(parse(FLAGS[3])).scaled_init_off


def test_help_names_every_flag() -> None:
    text = add_flags(argparse.ArgumentParser()).format_help()
    assert all(flag in text for flag in FLAGS)


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        ((), "preln"),
        ((FLAGS[4], "preln"), "preln"),
        ((FLAGS[0],), "lns"),
        ((FLAGS[4], "lns"), "lns"),
        ((FLAGS[0], FLAGS[4], "lns"), "lns"),
        ((FLAGS[4], "lns:exponent=0.25"), "lns:exponent=0.25"),
        ((FLAGS[0], FLAGS[1], "0.25", FLAGS[4], "lns:exponent=0.25"), "lns:exponent=0.25"),
        ((FLAGS[4], "sandwich_depth:exponent=0.25"), "sandwich_depth:exponent=0.25"),
        ((FLAGS[4], "skipinit:start=0.001"), "skipinit:start=0.001"),
    ],
)
def test_a_scheme_by_its_name(words: tuple[str, ...], scheme: str) -> None:
    settings = Settings.of(parse(*words)).check()
    assert str(settings.scheme) == scheme
    assert settings.scaled_init_off is settings.active is (scheme != "preln")
    stored = SimpleNamespace()
    settings.store(stored)
    assert str(Settings.of(stored).scheme) == scheme
    # What is written does not depend on the way in which LayerNorm Scaling was asked for.
    assert (stored.layernorm_scaling, stored.norm_scheme == "") == (
        (True, True) if "lns" in scheme else (False, not words)
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (FLAGS[0], FLAGS[4], "sandwich"),
            "--layernorm-scaling is short for --norm-scheme lns, but --norm-scheme sandwich",
        ),
        ((FLAGS[0], FLAGS[1], "0.3", FLAGS[4], "lns"), "exponent is 0.3, but --norm-scheme lns has exponent 0.5"),
        ((FLAGS[1], "0.3", FLAGS[4], "sandwich"), "without --layernorm-scaling"),
        ((FLAGS[4], "sandwhich"), "--norm-scheme: unknown scheme 'sandwhich'"),
        ((FLAGS[4], "lns:exponent=-1"), "--norm-scheme: scheme 'lns': exponent"),
        ((FLAGS[4], "preln", FLAGS[2]), "without --layernorm-scaling or --norm-scheme"),
    ],
)
def test_schemes_that_contradict_themselves(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(LNSConfigError, match=message):
        Settings.of(parse(*words)).check()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(True, None, True, True), "contradict"),
        (Settings(False, 0.3), "without --layernorm-scaling"),
        (Settings(False, None, True), "without --layernorm-scaling"),
        (Settings(True, -1.0), "finite number >= 0"),
        (Settings(True, float("nan")), "finite number >= 0"),
    ],
)
def test_settings_that_contradict_themselves(settings: Settings, words: str) -> None:
    with pytest.raises(LNSConfigError, match=words):
        settings.check()


@pytest.mark.parametrize(
    ("settings", "off"),
    [
        (Settings(), False),
        (Settings(True), True),
        (Settings(True, layernorm_scaling_keep_scaled_init=True), False),
        (Settings(no_scaled_init=True), True),
        (Settings(norm_scheme="sandwich"), True),
        (Settings(norm_scheme="sandwich", layernorm_scaling_keep_scaled_init=True), False),
    ],
)
def test_initialization_policy(settings: Settings, off: bool) -> None:
    config = SimpleNamespace(init_method="plain", output_layer_init_method="scaled", num_layers=4)
    make = launching.config_from_args(lambda args, config_class=None: config)
    args = SimpleNamespace()
    settings.store(args)
    assert make(args) is config
    assert config.output_layer_init_method == ("plain" if off else "scaled")
    assert config.layernorm_scaling is settings.layernorm_scaling


def test_the_exponent_is_spelled_out_for_the_checkpoint() -> None:
    args = parse(FLAGS[0])
    make = launching.config_from_args(lambda args, config_class=None: SimpleNamespace(init_method=None, num_layers=4))
    assert make(args).layernorm_scaling_exponent == 0.5
    assert args.layernorm_scaling_exponent == 0.5


def test_yaml_cfg_is_refused_with_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    load = launching.load_yaml(lambda path: path)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--yaml-cfg", "x.yaml"])
    assert load("x.yaml") == "x.yaml"
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--yaml-cfg", "x.yaml", "--layernorm-scaling"])
    with pytest.raises(LNSConfigError, match="no effect with --yaml-cfg"):
        load("x.yaml")


def restore(running: argparse.Namespace, saved: Any) -> argparse.Namespace:
    checkpoint.load_args(lambda args, load_arg="load": (args, saved))(running)
    return running


def test_use_checkpoint_args_restores_what_was_not_given() -> None:
    saved = parse(FLAGS[0], FLAGS[1], "0.75", FLAGS[2])
    assert Settings.of(restore(parse(), saved)) == Settings(True, 0.75, True)
    assert Settings.of(restore(parse(FLAGS[0]), saved)) == Settings(True, 0.75, True)
    assert Settings.of(restore(parse(), parse(FLAGS[3]))).no_scaled_init
    saved = parse(FLAGS[4], "sandwich_depth:exponent=0.75", FLAGS[2])
    assert Settings.of(restore(parse(), saved)) == Settings(False, 0.5, True, False, "sandwich_depth:exponent=0.75")


def test_a_scheme_of_the_checkpoint_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    restore(parse(), parse(FLAGS[4], "layerscale"))
    assert capsys.readouterr().out == "olmo-lns: from the checkpoint's arguments: --norm-scheme layerscale\n"


def test_a_checkpoint_from_before_the_plugin_changes_nothing() -> None:
    assert Settings.of(restore(parse(), SimpleNamespace())) == Settings()


def test_no_checkpoint_changes_nothing() -> None:
    args = parse(FLAGS[0])
    assert checkpoint.load_args(lambda args, load_arg="load": args)(args) is args


@pytest.mark.parametrize(
    ("running", "saved", "words"),
    [
        ((FLAGS[0],), (), r"saved with Pre-LN .* this run has lns:exponent=0.5"),
        ((FLAGS[0], FLAGS[1], "1"), (FLAGS[0],), r"exponent=0.5.* this run has lns:exponent=1"),
        ((FLAGS[4], "preln"), (FLAGS[4], "sandwich"), r"saved with sandwich .* this run has Pre-LN"),
        ((FLAGS[0],), (FLAGS[4], "lnsafterff"), r"saved with lnsafterff:exponent=0.5 .* this run has lns:exponent=0.5"),
    ],
)
def test_what_was_given_and_differs_is_refused(running: Any, saved: Any, words: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=words):
        restore(parse(*running), parse(*saved))


#: Whose weights have a Pre-LN model's names and shapes. Megatron builds none of them, but may be given one.
STOCK_KEYS = [name for name in names() if name != "preln" and parse_scheme(name).stock_keys(4)]


@pytest.mark.parametrize("name", STOCK_KEYS)
@pytest.mark.parametrize("running", [(), (FLAGS[0],), (FLAGS[4], "lnsafterbranch")])
def test_weights_with_stock_names_are_refused(name: str, running: tuple[str, ...]) -> None:
    if Settings.of(parse(*running)).scheme.name == name:
        pytest.skip("its own weights")
    with pytest.raises(CheckpointMismatchError, match=f"saved with {name}"):
        load(parse(*running), SimpleNamespace(norm_scheme=name))
    with pytest.raises(CheckpointMismatchError, match=f"saved with {name}"):
        load(with_arguments(*running, finetune=True), SimpleNamespace(norm_scheme=name))


def load(running: Any, saved: Any, **state: Any) -> Any:
    contents = {"args": saved, **state} if saved is not None else state
    base = checkpoint.load_base(lambda load_dir, args, rank0: (contents, "iter_7", False, None))
    return base("folder", running)


@pytest.mark.parametrize(
    ("running", "saved", "words"),
    [
        ((), (FLAGS[0],), r"iter_7 was saved with lns:exponent=0.5 .* but this run has Pre-LN"),
        ((FLAGS[0],), (), r"saved with Pre-LN .* this run has lns"),
        ((FLAGS[0],), (FLAGS[0], FLAGS[1], "1"), "exponent=1.*exponent=0.5"),
        ((), (FLAGS[4], "lnsafterbranch"), "saved with lnsafterbranch:exponent=0.5 .* but this run has Pre-LN"),
        ((FLAGS[4], "lnsafterbranch"), (), "saved with Pre-LN .* but this run has lnsafterbranch:exponent=0.5"),
        ((FLAGS[4], "lnsafterattn"), (FLAGS[0],), "saved with lns:exponent=0.5 .* has lnsafterattn:exponent=0.5"),
        ((FLAGS[4], "sandwich_depth"), (FLAGS[4], "sandwich_depth:exponent=1"), "run with another exponent"),
    ],
)
def test_weights_of_another_kind_are_refused(running: Any, saved: Any, words: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=words):
        load(parse(*running), parse(*saved))


@pytest.mark.parametrize("words", [(), (FLAGS[0],), (FLAGS[0], FLAGS[2]), (FLAGS[3],), (FLAGS[4], "sandwich")])
def test_the_same_settings_load(words: Any) -> None:
    assert load(parse(*words), parse(*words))[1] == "iter_7"


def test_folded_weights_are_not_scaled_again() -> None:
    folded = SimpleNamespace(layernorm_scaling=False, layernorm_scaling_folded=True)
    with pytest.raises(CheckpointMismatchError, match="applied twice"):
        load(parse(FLAGS[0]), folded)


FOLDED = SimpleNamespace(layernorm_scaling=False, layernorm_scaling_exponent=0.5, layernorm_scaling_folded=True)


def with_arguments(*words: str, **more: Any) -> argparse.Namespace:
    args = parse(*words)
    vars(args).update(more)
    return args


@pytest.mark.parametrize("more", [{"finetune": True}, {"skip_train": True}])
def test_folded_weights_run_as_preln(more: dict[str, bool], capsys: pytest.CaptureFixture[str]) -> None:
    """What ``export`` tells its users to do."""
    assert load(with_arguments(**more), FOLDED)[1] == "iter_7"
    assert not Settings.of(restore(with_arguments(**more), FOLDED)).layernorm_scaling
    assert ("trained on as plain Pre-LN (--finetune)" in capsys.readouterr().out) is ("finetune" in more)
    with pytest.raises(CheckpointMismatchError, match="applied twice"):
        load(with_arguments(FLAGS[0], **more), FOLDED)
    with pytest.raises(CheckpointMismatchError, match="saved with lns:exponent=0.5 "):
        load(with_arguments(**more), parse(FLAGS[0]))


def test_folded_weights_are_stock_for_a_pre_ln_run() -> None:
    assert load(parse(), FOLDED)[1] == "iter_7"


def test_a_named_difference_can_be_allowed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(environment.ALLOW_MISMATCH, "lns-to-preln")
    load(parse(), parse(FLAGS[0]))
    assert "in spite of lns-to-preln" in capsys.readouterr().out
    assert not Settings.of(restore(parse(), parse(FLAGS[0]))).layernorm_scaling


def test_a_checkpoint_without_arguments_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    load(parse(FLAGS[0]), None, model={})
    assert "holds no arguments" in capsys.readouterr().out
