"""Runs the parser and the validation of a real Megatron-LM (MEGATRON_LM_SRC).

``python megatron_parse.py FILE…`` parses config files, counts the parameters of the models and prints one JSON object.
``python -m olmo_lns megatron_parse.py --lns-config FILE`` starts like a training script and prints JSON.
``python megatron_parse.py plan FILE…`` runs ``olmo-lns study plan``.
"""

import importlib.abc
import importlib.util
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


def padded(args):
    """Return the vocabulary size of the file's tokenizer as Megatron pads it for each tensor-parallel size."""
    try:  # Megatron up to 0.17
        from megatron.training.tokenizer import tokenizer as module

        size, with_padding = int(module._NullTokenizer(args.vocab_size).vocab_size), module._vocab_size_with_padding
    except ImportError:
        from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding as with_padding

        size = int(NullTokenizer(args.vocab_size).vocab_size)
    found = set()
    for args.tensor_model_parallel_size in (1, 2, 4, 8):
        found.add(int(with_padding(size, args, logging_enabled=False)))
    return sorted(found)


def parameters(args, vocabulary):
    """Count the parameters of Megatron Core's GPTModel on the meta device, with local layers, which need no GPU."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "add_bias_linear", "normalization")
    config = TransformerConfig(
        **{name: getattr(args, name) for name in names},
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    torch.cuda.current_device = lambda: "meta"
    with torch.device("meta"):
        model = GPTModel(
            config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=vocabulary,
            max_sequence_length=args.seq_length, position_embedding_type="rope",
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )  # fmt: skip
    return sum(parameter.numel() for parameter in model.parameters())


def main(words):
    from olmo_lns.study.engines.megatron import parse, read, to_flags

    if words[0].startswith("--"):
        found = vars(parse(words)) | {"connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")}
    else:
        found = {}
        for path in map(Path, words):
            args = parse(to_flags(read(path), placeholder=True))
            vocabularies = padded(args)
            counted = {"padded": vocabularies, "parameters": parameters(args, vocabularies[0])}
            found[path.name] = vars(args) | counted
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        from olmo_lns import cli

        sys.exit(cli.main(["study", *sys.argv[1:]]))
    main(sys.argv[1:])
