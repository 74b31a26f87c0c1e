"""Checkpoints with random fp32 weights, of every kind that ``olmo-lns export`` reads, for measurements.

None was trained, and only their layout is that of the real thing: names, files, one chunk for each weight.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import torch

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.archive import write_archive
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.record import Record
from olmo_lns.schemes import LNS

__all__ = ["EXPORTS", "MAKERS", "SIZES"]

#: The 1B model of the scaling study, and a small one to try a measurement with.
SIZES = {
    "1B": dict(n_layers=16, d_model=2048, n_heads=16, mlp_hidden_size=16384),
    "60M": dict(n_layers=8, d_model=512, n_heads=8, mlp_hidden_size=4096),
}
_VOCABULARY = 50280
_OLMO = dict(rope=True, include_bias=False, bias_for_layer_norm=False, weight_tying=False, vocab_size=_VOCABULARY)
Shapes = dict[str, tuple[int, ...]]


def _olmo_config(size: str, gain: bool) -> dict[str, Any]:
    return {**_OLMO, **SIZES[size], "layer_norm_type": "lns_rms", "layer_norm_with_affine": gain}


def _olmo(folder: Path, size: str, gain: bool = True) -> None:
    """OLMo's unsharded layout; written tensor by tensor."""
    config = _olmo_config(size, gain)
    shapes = Architecture.from_config(config, "synthetic").shapes()
    tensors = {
        name: LazyTensor(shape, torch.float32, lambda shape=shape: torch.randn(shape))  # type: ignore[misc]
        for name, shape in shapes.items()
    }
    folder.mkdir()
    write_archive(folder / "model.pt", tensors)
    _describe_olmo(folder, config)


def _describe_olmo(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.yaml").write_text(json.dumps({"model": config}))
    Record(LNS, "rms", "plain").write(folder)


def _olmo_without_gain(folder: Path, size: str) -> None:
    _olmo(folder, size, gain=False)


def _olmo_sharded(folder: Path, size: str) -> None:
    """OLMo's ``torch_new``."""
    config = _olmo_config(size, True)
    shapes = Architecture.from_config(config, "synthetic").shapes()
    _distributed(folder / "model_and_optim", {f"model.{name}": shape for name, shape in shapes.items()})
    _describe_olmo(folder, config)


def _olmo_core(folder: Path, size: str) -> None:
    """What OLMo-core's trainer saves of a Llama-like model with our blocks."""
    shape = SIZES[size]
    width, inner = shape["d_model"], shape["mlp_hidden_size"] // 2
    shapes: Shapes = {"embeddings.weight": (_VOCABULARY, width)}
    for index in range(shape["n_layers"]):
        block = f"blocks.{index}"
        shapes |= {f"{block}.attention.w_{part}.weight": (width, width) for part in ("q", "k", "v", "out")}
        shapes |= {f"{block}.feed_forward.{part}.weight": (inner, width) for part in ("w1", "w3")}
        shapes |= {f"{block}.feed_forward.w2.weight": (width, inner)}
        shapes |= {f"{block}.{norm}.weight": (width,) for norm in ("attention_norm", "feed_forward_norm")}
    shapes |= {"lm_head.norm.weight": (width,), "lm_head.w_out.weight": (_VOCABULARY, width)}
    _distributed(folder / "model_and_optim", {f"model.{name}": value for name, value in shapes.items()})
    norm = {"name": "rms", "bias": False, "eps": 1e-5}
    settings: dict[str, Any] = {
        "_CLASS_": "olmo_lns.olmo_core.BlockConfig",
        "name": "default",
        "attention": {"n_heads": shape["n_heads"], "bias": False, "rope": {"name": "default", "theta": 500_000}},
        "feed_forward": {"hidden_size": inner, "bias": False},
        "layer_norm": norm,
        "scheme": "lns",
    }
    model: dict[str, Any] = {
        "d_model": width,
        "n_layers": shape["n_layers"],
        "vocab_size": _VOCABULARY,
        "block": settings,
    }
    model["lm_head"] = {"layer_norm": norm, "bias": False}
    (folder / "config.json").write_text(json.dumps({"model": model}))


def _megatron(folder: Path, size: str) -> None:
    """What Megatron's ``--ckpt-format torch_dist`` saves of a Llama-like model, layers under their numbers."""
    shape = SIZES[size]
    width, inner = shape["d_model"], shape["mlp_hidden_size"] // 2
    shapes: Shapes = {"embedding.word_embeddings.weight": (_VOCABULARY, width)}
    for index in range(shape["n_layers"]):
        attention, mlp = (f"decoder.layers.{index}.{part}" for part in ("self_attention", "mlp"))
        shapes |= {
            f"{attention}.linear_qkv.weight": (3 * width, width),
            f"{attention}.linear_proj.weight": (width,) * 2,
        }
        shapes |= {f"{mlp}.linear_fc1.weight": (2 * inner, width), f"{mlp}.linear_fc2.weight": (width, inner)}
        shapes |= {
            f"{attention}.linear_qkv.layer_norm_weight": (width,),
            f"{mlp}.linear_fc1.layer_norm_weight": (width,),
        }
    shapes |= {"decoder.final_layernorm.weight": (width,), "output_layer.weight": (_VOCABULARY, width)}
    iteration = folder / "iter_0000001"
    _distributed(iteration, shapes)
    args = argparse.Namespace(
        num_layers=shape["n_layers"],
        hidden_size=width,
        ffn_hidden_size=inner,
        num_attention_heads=shape["n_heads"],
        max_position_embeddings=2048,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        layernorm_zero_centered_gamma=False,
        layernorm_scaling=True,
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        group_query_attention=False,
        untie_embeddings_and_output_weights=True,
    )
    torch.save({"args": args, "iteration": 1, "checkpoint_version": 3.0}, iteration / "common.pt")
    (iteration / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def _transformers(folder: Path, size: str) -> None:
    """A folder of ours for transformers, by our own import."""
    made = folder.with_name(f"{folder.name}-olmo")
    _olmo(made, size)
    words = ["hf", "import", str(made), "-o", str(folder), "--tokenizer", "none"]
    subprocess.run([sys.executable, "-m", "olmo_lns", *words], check=True, stdout=subprocess.DEVNULL)
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


def _distributed(folder: Path, shapes: Shapes) -> None:
    """A folder of ``torch.distributed.checkpoint``; the model is held in memory while it is written."""
    from torch.distributed import checkpoint

    folder.mkdir(parents=True)
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)


#: Kind of checkpoint -> what makes one of a size in a new folder.
MAKERS: dict[str, Callable[[Path, str], None]] = {
    "OLMo": _olmo,
    "OLMo, norms without gain": _olmo_without_gain,
    "OLMo, sharded": _olmo_sharded,
    "OLMo-core": _olmo_core,
    "Megatron": _megatron,
    "transformers": _transformers,
}
_HF = ["--format", "hf", "--tokenizer", "none"]
#: (Kind, options): every kind in every format that it has.
EXPORTS: tuple[tuple[str, list[str]], ...] = (
    ("OLMo", ["--format", "olmo"]),
    ("OLMo", _HF),
    ("OLMo", [*_HF, "--dtype", "bf16"]),
    ("OLMo, norms without gain", ["--format", "olmo"]),
    ("OLMo, sharded", ["--format", "olmo"]),
    ("OLMo, sharded", ["--format", "olmo-unsharded"]),
    ("OLMo-core", ["--format", "olmo-core"]),
    ("OLMo-core", _HF),
    ("Megatron", ["--format", "megatron"]),
    ("Megatron", _HF),
    ("transformers", _HF),
)
