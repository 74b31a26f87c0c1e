"""Runs what this package wraps in ``megatron.training`` and ``megatron.post_training``, on checkpoints of every kind.

Usage: ``stock_training.py FOLDER``, on PYTHONPATH a Megatron-LM tree. With ONLY_SAVE=1 it only
lets Megatron save the checkpoints into FOLDER. ModelOpt's own modules are stand-ins where ModelOpt is not installed; none is called.
"""

import argparse
import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from support import megatron_cpu, megatron_launch, observing

folder = Path(sys.argv[1])
if importlib.util.find_spec("modelopt") is None:
    ends = ("", ".torch", ".torch.opt", ".torch.opt.plugins", ".torch.opt.plugins.mcore_dist_checkpointing",
            ".torch.quantization", ".torch.quantization.utils", ".torch.utils")  # fmt: skip
    sys.modules.update({f"modelopt{end}": mock.MagicMock() for end in ends})
    sys.modules["modelopt.torch.quantization.utils"].is_quantized = lambda model: False

from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import arguments, checkpointing, global_vars, training  # noqa: E402

has_modelopt = importlib.util.find_spec("megatron.post_training") is not None
if has_modelopt:
    from megatron.post_training import checkpointing as post_training

#: core_transformer_config_from_args is defined here, up to 0.18 and later.
newer = sys.modules.get("megatron.training.argument_utils")
CONFIG_MODULE = newer if hasattr(newer, "core_transformer_config_from_args") else arguments
megatron_cpu.initialize()
stock_argv = ["pretrain_gpt.py", *megatron_launch.MODEL.split(), "--no-save-optim", "--no-save-rng", "--no-load-optim"]
stock_argv += ["--no-load-rng", "--num-layers", "2", "--hidden-size", "32"]


def parsed(*words):
    """Megatron's arguments, parsed and validated."""
    sys.argv = [*stock_argv, *words]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    args.padded_vocab_size = 64
    return args


def running(*words):
    """Parse, and make the arguments global."""
    args = parsed(*words)
    global_vars.unset_global_variables()
    global_vars.set_global_variables(args, build_tokenizer=False)
    return args


def config_of(args):
    return CONFIG_MODULE.core_transformer_config_from_args(args)


def provider(pre_process=True, post_process=True, config=None, **_):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    args = global_vars.get_args()
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    parts = {"pre_process": pre_process, "post_process": post_process, "position_embedding_type": "rope"}
    return GPTModel(config_of(args), spec, args.padded_vocab_size, args.max_position_embeddings, **parts)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(name, ckpt_format):
    words = ["--ckpt-format", ckpt_format] if ckpt_format != "torch_dcp" else ["--ckpt-format", "torch_dist"]
    args = running(*words, "--save", str(folder / name), "--save-interval", "10")
    global_vars._build_tokenizer(args)  # newer versions save it too
    args.padded_vocab_size = 64
    args.ckpt_format = ckpt_format  # the parser wants FSDP2 for torch_dcp
    checkpointing.save_checkpoint(3, [provider()], None, None, 0)


def save_all():
    for name in ("torch_dist", "torch", "torch_dcp"):
        save(name, name)
    (folder / "empty").mkdir()
    for name in ("torch_dist", "torch"):
        cut, gone, alien = (folder / f"{name}_{end}" for end in ("cut", "gone", "tracker"))
        for copy in (cut, gone, alien):
            shutil.copytree(folder / name, copy)
        largest = max((file for file in cut.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        for file in [*cut.rglob("*.metadata"), *cut.rglob("common.pt")]:
            file.write_bytes(file.read_bytes()[:40])
        shutil.rmtree(gone / "iter_0000003")
        (alien / "latest_checkpointed_iteration.txt").write_text("three")
    # Without arguments, as other programs write.
    shutil.copytree(folder / "torch", folder / "torch_bare")
    (file,) = (folder / "torch_bare").rglob("*.pt")
    state = torch.load(file, weights_only=False)
    del state["args"]
    torch.save(state, file)
    # NeMo's: a folder of weights without a tracker.
    shutil.copytree(folder / "torch_dist" / "iter_0000003", folder / "nemo" / "model_weights")


KINDS = (
    "torch_dist", "torch", "torch_dcp", "torch_bare", "nemo", "empty", "missing", "torch_dist_cut", "torch_cut",
    "torch_dist_gone", "torch_gone", "torch_dist_tracker", "torch_tracker", None,
)  # fmt: skip


# --- cases ------------------------------------------------------------------------------------------------------------


def place(kind):
    return None if kind is None else str(folder / kind)


def restored_args(kind):
    return checkpointing.load_args_from_checkpoint(running("--load", place(kind)) if kind else running())


def base(kind, rank0):
    args = running("--load", place(kind)) if kind else running()
    more = {}
    if not rank0 and kind and kind.startswith("torch_d"):
        model = provider()
        state = model.state_dict() if kind == "torch_dcp" else model.sharded_state_dict()
        more["sharded_state_dict"] = {"model": state} | ({"args": None} if kind == "torch_dcp" else {})
    return checkpointing._load_base_checkpoint(place(kind), args, rank0=rank0, **more)


def weights(kind, ckpt_format, *words):
    running(*(("--load", place(kind)) if kind else ()), "--ckpt-format", ckpt_format, *words)
    model = provider()
    return checkpointing.load_checkpoint([model], None, None), model


def modelopt(kind, ckpt_format, **options):
    args = running(*(("--load", place(kind)) if kind else ()), "--ckpt-format", ckpt_format)
    args.export_kd_teacher_load = place(kind)
    model = provider()
    return post_training.load_modelopt_checkpoint([model], **options), model


def built(wrap_with_ddp, *words):
    running(*words)
    return [
        each.module if wrap_with_ddp else each
        for each in training.get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=wrap_with_ddp)
    ]


def set_up(*words):
    running(*words)
    try:
        model, optimizer, scheduler = training.setup_model_and_optimizer(provider, ModelType.encoder_or_decoder)
    except TypeError:  # newer versions take the type first
        model, optimizer, scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, provider)
    return model[0].module, scheduler.state_dict(), optimizer.param_groups


def parser_of(parser):
    actions = arguments.add_megatron_arguments(parser)._actions
    return [
        [each.option_strings, each.dest, each.default]
        for each in actions
        if not each.dest.startswith(("layernorm_scaling", "no_scaled_init"))
    ]


FUNCTIONS = {
    "add_megatron_arguments": arguments.add_megatron_arguments,
    "core_transformer_config_from_args": CONFIG_MODULE.core_transformer_config_from_args,
    "get_model": training.get_model,
    "setup_model_and_optimizer": training.setup_model_and_optimizer,
    "load_args_from_checkpoint": checkpointing.load_args_from_checkpoint,
    "_load_base_checkpoint": checkpointing._load_base_checkpoint,
}
if has_modelopt:
    FUNCTIONS["load_modelopt_checkpoint"] = post_training.load_modelopt_checkpoint

partial = functools.partial
cases = {
    "add_megatron_arguments: a parser": lambda: parser_of(argparse.ArgumentParser(allow_abbrev=False)),
    "add_megatron_arguments: no parser": lambda: arguments.add_megatron_arguments(None),
    "add_megatron_arguments: an unknown flag": partial(parsed, "--no-such-flag"),
    "core_transformer_config_from_args: dense": lambda: config_of(parsed()),
    "core_transformer_config_from_args: MoE": lambda: config_of(parsed("--num-experts", "4")),
    "core_transformer_config_from_args: no arguments": lambda: config_of(None),
    "core_transformer_config_from_args: a wrong call": lambda: config_of.__wrapped__(),
    "get_model: plain": partial(built, False),
    "get_model: DDP": partial(built, True),
    "get_model: bf16": partial(built, False, "--bf16"),
    "get_model: a provider that fails": lambda: training.get_model(lambda **_: 1 / 0, ModelType.encoder_or_decoder),
    "setup_model_and_optimizer: no checkpoint": set_up,
}  # fmt: skip
for kind in KINDS:
    cases[f"load_args_from_checkpoint: {kind}"] = partial(restored_args, kind)
    for rank0 in (True, False):
        cases[f"_load_base_checkpoint: {kind}, rank0={rank0}"] = partial(base, kind, rank0)
    for ckpt_format in ("torch", "torch_dist"):
        cases[f"_load_base_checkpoint: {kind}, load_checkpoint of {ckpt_format}"] = partial(weights, kind, ckpt_format)
        if has_modelopt:
            name = f"load_modelopt_checkpoint: {kind}, {ckpt_format}"
            cases[name] = partial(modelopt, kind, ckpt_format)
            cases[f"{name}, teacher"] = partial(modelopt, kind, ckpt_format, load_arg="export_kd_teacher_load")
    cases[f"setup_model_and_optimizer: {kind}"] = partial(set_up, *(("--load", place(kind)) if kind else ()))
if os.environ.get("ONLY_SAVE"):
    save_all()
else:
    observing.main(cases, FUNCTIONS, folder, "megatron")
