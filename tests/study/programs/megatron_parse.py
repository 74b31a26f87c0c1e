"""Runs the parser and the validation of a real Megatron-LM (MEGATRON_LM_SRC) as on an A100 and an H100.

``python megatron_parse.py FILE…`` parses config files, counts the parameters of the models and prints one JSON object.
``python -m olmo_lns megatron_parse.py --lns-config FILE`` starts like a training script and prints JSON for each GPU.
``python megatron_parse.py plan FILE…`` runs ``olmo-lns study plan``.
"""

import contextlib
import importlib.abc
import importlib.util
import io
import json
import os
import sys
import types
import typing
from pathlib import Path
from unittest import mock

import torch
import typing_extensions

if not hasattr(typing, "override"):  # Megatron 0.18 and later import it; Python 3.12 and later have it
    typing.override = typing_extensions.override


class Module(types.ModuleType):
    __version__ = "3.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None}) if name[0].isupper() else mock.MagicMock()


class Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for triton: Megatron 0.16 and later import it for kernels that the parser does not run."""

    def find_spec(self, name, *_):
        return importlib.util.spec_from_loader(name, self, is_package=True) if name.split(".")[0] == "triton" else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module): ...


if importlib.util.find_spec("triton") is None:
    sys.meta_path.append(Triton())
os.environ.update(RANK="0", WORLD_SIZE="8", LOCAL_RANK="0")  # as torchrun sets them
GPUS = {"A100": types.SimpleNamespace(major=8, minor=0), "H100": types.SimpleNamespace(major=9, minor=0)}
KEYS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "train_iters", "global_batch_size",
    "lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "lr_decay_style", "adam_beta1", "adam_beta2", "adam_eps",
    "weight_decay", "clip_grad", "swiglu", "add_bias_linear", "normalization", "untie_embeddings_and_output_weights",
    "position_embedding_type", "init_method_std", "bf16", "layernorm_scaling", "no_scaled_init", "attention_dropout",
    "hidden_dropout", "save", "data_path", "consumed_train_samples", "start_weight_decay", "end_weight_decay",
)  # fmt: skip


def padded(args):
    """Return the vocabulary size of the file's tokenizer as Megatron pads it for each tensor-parallel size."""
    try:  # Megatron up to 0.17
        from megatron.training.tokenizer import tokenizer as module

        size = int(module._NullTokenizer(args.vocab_size).vocab_size)
        with_padding = module._vocab_size_with_padding
    except ImportError:
        from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding as with_padding

        size = int(NullTokenizer(args.vocab_size).vocab_size)
    found = {}
    for tp in (1, 2, 4, 8):
        args.tensor_model_parallel_size = tp
        found[str(tp)] = int(with_padding(size, args, logging_enabled=False))
    return found


def parameters(args, vocabulary):
    """Count the parameters of Megatron Core's GPTModel on the meta device, with local layers, which need no GPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        add_bias_linear=args.add_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        normalization=args.normalization,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    torch.cuda.current_device = lambda: "meta"
    with torch.device("meta"):
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=vocabulary,
            max_sequence_length=args.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
    return sum(parameter.numel() for parameter in model.parameters())


def parsed(flags):
    from olmo_lns.study.engines.megatron import parse

    found = {}
    for name, gpu in GPUS.items():
        with (
            mock.patch.object(torch.cuda, "get_device_properties", lambda device=None, gpu=gpu: gpu),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            found[name] = parse(flags)
    return found


def start(flags):
    for name, args in parsed(flags).items():
        found = {key: getattr(args, key) for key in ("tensor_model_parallel_size", "sequence_parallel", "eval_iters")}
        print(json.dumps({"gpu": name, "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), **found}))


def main(files):
    from olmo_lns.integrations.megatron.settings import variables
    from olmo_lns.study.engines.megatron import read, to_flags

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for path in map(Path, files):
            flags = to_flags(read(path), placeholder=True)
            with mock.patch.dict(os.environ, variables(flags)):
                args = parsed(flags)["H100"]
            record = {key: getattr(args, key, None) for key in KEYS}
            record["epsilon"] = getattr(args, "norm_epsilon", None) or getattr(args, "layernorm_epsilon", None)
            record["padded"] = padded(args)
            found[path.name] = record
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        counted = {}
        for record in found.values():
            key = tuple(record[name] for name in KEYS[:4])
            if key not in counted:
                counted[key] = parameters(types.SimpleNamespace(**record), record["padded"]["1"])
            record["parameters"] = counted[key]
    print(json.dumps(found, default=str))


def check(words):
    from olmo_lns import cli

    sys.exit(cli.main(["study", *words]))


if __name__ == "__main__":
    mode = check if sys.argv[1] == "plan" else start if sys.argv[1].startswith("--") else main
    mode(sys.argv[1:])
