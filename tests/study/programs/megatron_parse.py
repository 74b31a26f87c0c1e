"""Parse config files with a real Megatron-LM and count its model's parameters; one JSON object on the last line.

Run in a process of its own with MEGATRON_LM_SRC set: ``python megatron_parse.py FILE…``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import typing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typing_extensions

if not hasattr(typing, "override"):  # Megatron from 0.18 on declares Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

os.environ.update(RANK="0", WORLD_SIZE="8", LOCAL_RANK="0")  # torchrun's
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
KEYS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "train_iters", "global_batch_size",
    "lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "lr_decay_style", "adam_beta1", "adam_beta2", "adam_eps",
    "weight_decay", "clip_grad", "swiglu", "add_bias_linear", "normalization", "untie_embeddings_and_output_weights",
    "position_embedding_type", "init_method_std", "bf16", "layernorm_scaling", "no_scaled_init", "attention_dropout",
    "hidden_dropout", "save", "data_path", "consumed_train_samples", "start_weight_decay", "end_weight_decay",
)  # fmt: skip


def padded(args: Any) -> dict[str, int]:
    """Megatron's own padded vocabulary of the file's tokenizer, for each tensor-parallel size."""
    try:  # up to 0.17
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


def parameters(args: Any, vocabulary: int) -> int:
    """Parameters of Megatron Core's GPTModel (local layers: no GPU needed), on the meta device."""
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
    torch.cuda.current_device = lambda: "meta"  # type: ignore[assignment, return-value]
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


def main(files: list[str]) -> None:
    from olmo_lns.integrations.megatron.settings import variables
    from olmo_lns.study.engines.megatron_args import parse, read, to_flags

    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for name in files:
            path = Path(name)
            flags = to_flags(read(path), placeholder=True)
            with mock.patch.dict(os.environ, variables(flags)):
                for major in (8, 9):  # A100, H100
                    gpu = type("Gpu", (), {"major": major, "minor": 0})()
                    with mock.patch.object(torch.cuda, "get_device_properties", lambda device=None, gpu=gpu: gpu):
                        args = parse(flags)
            record = {key: getattr(args, key, None) for key in KEYS}
            record["epsilon"] = getattr(args, "norm_epsilon", None) or getattr(args, "layernorm_epsilon", None)
            record["padded"] = padded(args)
            found[path.name] = record
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        counted: dict[tuple[Any, ...], int] = {}
        for record in found.values():
            key = tuple(record[name] for name in KEYS[:4])
            if key not in counted:
                counted[key] = parameters(type("Args", (), record), record["padded"]["1"])
            record["parameters"] = counted[key]
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
