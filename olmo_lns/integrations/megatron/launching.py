"""Wrappers around ``megatron.training``: flags, config, YAML."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.initialization import describe, use_plain_initialization
from olmo_lns.integrations.megatron.report import say
from olmo_lns.integrations.megatron.settings import FLAGS, Settings, add_flags

__all__ = ["add_arguments", "config_from_args", "load_yaml"]

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def add_arguments(original: AddArguments) -> AddArguments:
    """Megatron's own options, then ours."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_flags(original(parser))

    return add_megatron_arguments


def config_from_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the config with the settings of the arguments and choose the initialization."""

    def core_transformer_config_from_args(args: Any, config_class: type | None = None) -> Any:
        config = original(args, config_class)
        settings = Settings.of(args).check()
        settings.store(config)
        if settings != Settings():
            settings.store(args)  # with the exponent spelled out, for the checkpoint
        if settings.scaled_init_off:
            use_plain_initialization(config)
            if not settings.layernorm_scaling:  # otherwise part of the start-up line
                say(describe(config, off=True))
        return config

    return core_transformer_config_from_args


def load_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """``--yaml-cfg`` replaces all arguments; ours would be dropped without a word."""

    def load_yaml(yaml_path: Any) -> Any:
        given = [word for word in sys.argv[1:] if word.split("=")[0] in FLAGS]
        if given:
            raise LNSConfigError(
                f"{given[0]} has no effect with --yaml-cfg, which replaces every command-line argument: pass "
                "Megatron's settings as flags."
            )
        return original(yaml_path)

    return load_yaml
