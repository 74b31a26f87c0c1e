"""Flags, their way through args and config, and what a checkpoint restores."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.megatron import checkpoint, launching
from olmo_lns.integrations.megatron.settings import FLAGS, Settings, add_flags
from olmo_lns.record import OVERRIDE_VARIABLE


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
    ],
)
def test_initialization_policy(settings: Settings, off: bool) -> None:
    config = SimpleNamespace(init_method="plain", output_layer_init_method="scaled")
    make = launching.config_from_args(lambda args, config_class=None: config)
    args = SimpleNamespace()
    settings.store(args)
    assert make(args) is config
    assert config.output_layer_init_method == ("plain" if off else "scaled")
    assert config.layernorm_scaling is settings.layernorm_scaling


def test_the_exponent_is_spelled_out_for_the_checkpoint() -> None:
    args = parse(FLAGS[0])
    make = launching.config_from_args(lambda args, config_class=None: SimpleNamespace(init_method=None))
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


def test_a_checkpoint_from_before_the_plugin_changes_nothing() -> None:
    assert Settings.of(restore(parse(), SimpleNamespace())) == Settings()


def test_no_checkpoint_changes_nothing() -> None:
    args = parse(FLAGS[0])
    assert checkpoint.load_args(lambda args, load_arg="load": args)(args) is args


@pytest.mark.parametrize(
    ("running", "saved", "words"),
    [
        ((FLAGS[0],), (), r"saved with Pre-LN .* this run has lns \(exponent 0.5"),
        ((FLAGS[0], FLAGS[1], "1"), (FLAGS[0],), r"exponent 0.5.* this run has lns \(exponent 1"),
        ((FLAGS[3],), (FLAGS[0], FLAGS[2]), r"scaled_init"),
    ],
)
def test_what_was_given_and_differs_is_refused(running: Any, saved: Any, words: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=words):
        restore(parse(*running), parse(*saved))


def load(running: Any, saved: Any, **state: Any) -> Any:
    contents = {"args": saved, **state} if saved is not None else state
    base = checkpoint.load_base(lambda load_dir, args, rank0: (contents, "iter_7", False, None))
    return base("folder", running)


@pytest.mark.parametrize(
    ("running", "saved", "words"),
    [
        ((), (FLAGS[0],), r"iter_7 was saved with lns \(exponent 0.5, .* but this run has Pre-LN"),
        ((FLAGS[0],), (), r"saved with Pre-LN .* this run has lns"),
        ((FLAGS[0],), (FLAGS[0], FLAGS[1], "1"), "exponent 1.*exponent 0.5"),
        ((FLAGS[0],), (FLAGS[0], FLAGS[2]), "scaled_init=keep.*scaled_init=auto"),
        ((), (FLAGS[3],), "scaled_init=off.*scaled_init=auto"),
    ],
)
def test_weights_of_another_kind_are_refused(running: Any, saved: Any, words: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=words):
        load(parse(*running), parse(*saved))


@pytest.mark.parametrize("words", [(), (FLAGS[0],), (FLAGS[0], FLAGS[2]), (FLAGS[3],)])
def test_the_same_settings_load(words: Any) -> None:
    assert load(parse(*words), parse(*words))[1] == "iter_7"


def test_folded_weights_are_not_scaled_again() -> None:
    folded = SimpleNamespace(layernorm_scaling=False, layernorm_scaling_folded=True)
    with pytest.raises(CheckpointMismatchError, match="applied twice"):
        load(parse(FLAGS[0]), folded)


def test_a_named_difference_can_be_allowed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "lns-to-preln")
    load(parse(), parse(FLAGS[0]))
    assert "in spite of lns-to-preln" in capsys.readouterr().out
    assert not Settings.of(restore(parse(), parse(FLAGS[0]))).layernorm_scaling


def test_a_checkpoint_without_arguments_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    load(parse(FLAGS[0]), None, model={})
    assert "holds no arguments" in capsys.readouterr().out
