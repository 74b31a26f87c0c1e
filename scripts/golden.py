"""Write golden figures of tiny models, or compare with them: a refactoring must not change any figure.

    python scripts/golden.py write tests/golden/golden.npz
    python scripts/golden.py compare tests/golden/golden.npz     within the tolerance
    python scripts/golden.py compare tests/golden/golden.npz --pairs     a fifth of OLMo's cases

The figures describe initial weights, logits, gradients, losses of a few steps and exported tensors of tiny models of
OLMo and Megatron Core, with and without LayerNorm Scaling. The script uses only the package's entry points and command
line and upstream's classes and configs, so that it runs unchanged before and after a change of the package's modules.
The committed file was written at e67c8bb; an intended change of numbers writes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))  # before torch: sums depend on threads

import numpy as np
import torch

#: Allowed difference of a statistic, relative to the sum of the tensor's absolute values: twenty times the difference
#: between vector and scalar kernels (2.5e-6; ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2). An error of a
#: thousandth in the factor of one block changes figures by up to 3e-3 and exceeds the tolerance in 3,583 of them.
TOLERANCE = 5e-5
PACKAGES = ("ai2-olmo", "megatron-core", "numpy", "torch")
STEPS, BATCH, LENGTH, VOCABULARY, LAYERS, WIDTH = 5, 2, 8, 32, 4, 16
#: Sum, sum of absolute values, and projection of a tensor, in fp64.
Figure = tuple[float, float, float]
Named = Iterator[tuple[str, torch.Tensor]]


def pseudo_random(size: int) -> np.ndarray:
    """Return ``size`` fixed numbers in [-1, 1) by splitmix64 in integers, the same with every version of numpy."""
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0


def measure(*, pairs: bool = False) -> dict[str, Figure]:
    """Return every figure by its name, which ends with the shape. :param pairs: see :func:`olmo_cases`."""
    torch.set_num_threads(1)
    figures: dict[str, Figure] = {}
    for name, tensor in itertools.chain(olmo_figures(pairs), export_figures(), megatron_figures()):
        key = f"{name} {'x'.join(map(str, tensor.shape))}"
        if key in figures:
            raise SystemExit(f"two figures are named {key!r}")
        flat = np.ascontiguousarray(tensor.detach().numpy()).astype(np.float64).ravel()
        figures[key] = (float(flat.sum()), float(np.abs(flat).sum()), float(flat @ pseudo_random(flat.size)))
    return figures


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def write(path: Path, figures: dict[str, Figure]) -> None:
    text = {"versions": json.dumps(versions()), "names": "\n".join(figures)}
    encoded = {key: np.frombuffer(value.encode(), dtype=np.uint8) for key, value in text.items()}
    np.savez_compressed(path, statistics=np.array([*figures.values()], dtype=np.float32), **encoded)


def read(path: Path) -> tuple[dict[str, str], dict[str, Figure]]:
    """Return the versions and figures in a file that :func:`write` wrote."""
    with np.load(path) as file:
        names = file["names"].tobytes().decode().split("\n")
        rows = file["statistics"].astype(np.float64)
        return json.loads(file["versions"].tobytes()), dict(zip(names, map(tuple, rows), strict=True))


def relative_error(old: Figure, new: Figure) -> float:
    """Return the largest difference of the statistics, relative to the larger sum of absolute values."""
    size = max(old[1], new[1])
    return max(abs(a - b) for a, b in zip(old, new, strict=True)) / size if size else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--pairs", action="store_true", help="compare the OLMo cases in which each two settings meet")
    args = parser.parse_args()
    if any(name.startswith("OLMO_LNS_") for name in os.environ):
        parser.error("a variable OLMO_LNS_… would change the figures: unset it")
    if args.command == "write":
        write(args.file, figures := measure())
        print(f"wrote {args.file}: {len(figures)} figures, {args.file.stat().st_size / 1e3:.0f} kB")
        return 0
    saved_versions, expected = read(args.file)
    print(f"written with {saved_versions}, compared with {versions()}")
    actual = measure(pairs=args.pairs)
    left_out = {*olmo_cases()} - {*olmo_cases(args.pairs)}
    expected = {name: value for name, value in expected.items() if name.partition(": ")[0] not in left_out}
    errors = {name: relative_error(expected[name], actual[name]) for name in expected.keys() & actual.keys()}
    lines = [f"missing: {name}" for name in expected if name not in actual]
    lines += [f"new: {name}" for name in actual if name not in expected]
    for name, error in errors.items():
        if not error <= TOLERANCE:
            lines.append(f"{name}: off by {error:.1e}; expected the statistics {expected[name]}, found {actual[name]}")
    print(*sorted(lines)[:20], sep="\n")
    print(f"{len(lines)} of {len(expected)} figures differ (over {TOLERANCE:g}); largest: {max(errors.values()):.1e}")
    return bool(lines)


def load_plugin(group: str) -> None:
    """Call the entry point ``lns`` of ``group``, as upstream's plugin loader does."""
    (entry,) = (e for e in importlib.metadata.entry_points(group=group) if e.name == "lns")
    entry.load()()


def training(model: Any, loss_of: Callable[[int], torch.Tensor], optimizer: Any) -> Named:
    """Yield the gradients of the first batch, and the losses of a few steps."""
    losses = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        losses.append(loss_of(step))
        losses[-1].backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                yield f"gradient {name}", parameter.grad.clone()
        optimizer.step()
    yield "losses", torch.stack([loss.detach() for loss in losses])


def perturb(model: Any) -> None:
    """Move norm weights off 1 and biases off 0, which would hide a misplaced factor."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def tokens(step: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(100 + step))


NORMS = ("lns_rms", "lns_default", "lns_low_precision", "rms", "default")
BLOCKS, INITS, GROUPS = ("sequential", "llama"), ("normal", "mitchell", "full_megatron"), (1, 2)
PARAMETERS: dict[str, dict[str, bool]] = {
    "gains": {},
    "no-gains": {"layer_norm_with_affine": False},
    "biases": {"include_bias": True, "bias_for_layer_norm": True},
}


def olmo_config(**changes: Any) -> Any:
    """Return a tiny ModelConfig."""
    from olmo.config import ModelConfig

    values: dict[str, Any] = dict(d_model=WIDTH, n_heads=2, n_layers=LAYERS, mlp_hidden_size=2 * WIDTH)
    values |= dict(vocab_size=VOCABULARY, embedding_size=VOCABULARY, max_sequence_length=LENGTH)
    values |= dict(activation_type="swiglu", rope=True, init_device="cpu", init_std=0.1)
    values |= dict.fromkeys(("include_bias", "bias_for_layer_norm", "weight_tying"), False)
    values |= dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.0)
    return ModelConfig.new(**{**values, **changes})


def olmo_cases(pairs: bool = False) -> dict[str, dict[str, Any]]:
    """Return the settings of each case by its name.

    :param pairs: only 36 of the 180 cases. Any two values of two settings still meet in one of them.
    """
    found: dict[str, dict[str, Any]] = {}
    for case in itertools.product(*map(enumerate, (NORMS, BLOCKS, INITS, GROUPS, PARAMETERS))):
        if pairs and sum(index for index, _ in case) % 5:
            continue
        norm, block, init, group, parameters = (value for _, value in case)
        changes = dict(layer_norm_type=norm, block_type=block, init_fn=init, block_group_size=group)
        name = f"olmo/{norm}/{block}/{init}/groups of {group}/{parameters}"
        found[name] = changes | PARAMETERS[parameters]
    return found


def olmo_figures(pairs: bool) -> Named:
    load_plugin("olmo.plugins")
    for case, changes in olmo_cases(pairs).items():
        for name, tensor in olmo_case(changes):
            yield f"{case}: {name}", tensor


def olmo_case(changes: dict[str, Any]) -> Named:
    from olmo.config import OptimizerConfig, TrainConfig
    from olmo.model import OLMo
    from olmo.optim import build_optimizer

    torch.manual_seed(1)
    model = OLMo(olmo_config(**changes))
    for name, parameter in model.named_parameters():
        yield f"drawn {name}", parameter.detach().clone()
    perturb(model)
    with torch.no_grad():
        yield "logits", model(tokens(0)).logits

    def loss_of(step: int) -> torch.Tensor:
        logits = model(tokens(step)).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens(step)[:, 1:].flatten())

    config = TrainConfig(model=model.config)
    config.optimizer = OptimizerConfig(name="adamw", learning_rate=1e-2, weight_decay=0.1)
    yield from training(model, loss_of, build_optimizer(config, model))

    model = OLMo(olmo_config(init_device="meta", **changes))
    model.to_empty(device="cpu")
    torch.manual_seed(2)
    model.reset_parameters()
    yield "meta: drawn", torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    with torch.no_grad():
        yield "meta: logits", model(tokens(0)).logits


_LLAMA = dict(layer_norm_type="lns_default", block_type="llama", bias_for_layer_norm=True)
EXPORTS = {"lns_rms": dict(layer_norm_type="lns_rms"), "lns_default, llama block, biases of norms": _LLAMA}


def export_figures() -> Named:
    """Yield the tensors that the command line exports from checkpoints of OLMo."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, changes) in enumerate(EXPORTS.items()):
            checkpoint = Path(folder) / f"{number}-unsharded"
            save_olmo(checkpoint, changes)
            # Llama has no LayerNorm with a weight.
            for output_format in ("olmo", "hf") if name == "lns_rms" else ("olmo",):
                out = Path(folder) / f"{number}-{output_format}"
                options = ["--format", output_format, *(["--tokenizer", "none"] if output_format == "hf" else [])]
                run_cli("export", str(checkpoint), str(out), *options)
                for key, tensor in exported_weights(out).items():
                    yield f"export/{name}/{output_format}: {key}", tensor


def save_olmo(folder: Path, changes: dict[str, Any]) -> None:
    """Save a checkpoint of fixed weights with OLMo's FullCheckpointer, which needs DDP and a process group."""
    import torch.distributed as dist
    from olmo.checkpoint import FullCheckpointer
    from olmo.config import OptimizerConfig, TrainConfig
    from olmo.model import OLMo
    from olmo.optim import build_optimizer

    model = OLMo(olmo_config(init_fn="normal", **changes))
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    config = TrainConfig(model=model.config, save_folder=str(folder.parent))
    config.optimizer = OptimizerConfig(name="adamw")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        FullCheckpointer(config).save_checkpoint(folder, wrapped, build_optimizer(config, model), {"global_step": 1})
    finally:
        dist.destroy_process_group()


def run_cli(*arguments: str) -> None:
    """Run ``python -m olmo_lns`` in this interpreter, which has imported the frameworks."""
    before, sys.argv = sys.argv, ["olmo-lns", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_module("olmo_lns", run_name="__main__")
    except SystemExit as done:
        if done.code:
            raise
    finally:
        sys.argv = before


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load the weights of an export: ``model.pt`` (OLMo), or the safetensors files (transformers)."""
    from safetensors.torch import load_file

    if (folder / "model.pt").exists():
        return torch.load(folder / "model.pt", weights_only=True)
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


MEGATRON_ARMS = {"lns": {"layernorm_scaling": True}, "no flag": {}, "no_scaled_init": {"no_scaled_init": True}}


def megatron_figures() -> Named:
    load_plugin("megatron.plugins")
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.megatron_cpu import single_process  # replaces the CUDA functions that Megatron calls

    with single_process():
        for arm, norm, bias in itertools.product(MEGATRON_ARMS, ("RMSNorm", "LayerNorm"), (False, True)):
            for name, tensor in megatron_case(MEGATRON_ARMS[arm], normalization=norm, add_bias_linear=bias):
                yield f"megatron/{arm}/{norm}/{'biases' if bias else 'no biases'}: {name}", tensor


def megatron_case(flags: dict[str, bool], **changes: Any) -> Named:
    model = megatron_model(flags, **changes)
    for name, parameter in model.named_parameters():
        yield f"drawn {name}", parameter.detach().clone()
    perturb(model)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with torch.no_grad():
        yield "logits", model(tokens(0), positions, mask)

    def loss_of(step: int) -> torch.Tensor:
        ids = tokens(step, LENGTH + 1)
        return model(ids[:, :-1], positions, mask, labels=ids[:, 1:]).float().mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
    yield from training(model, loss_of, optimizer)


def megatron_model(flags: dict[str, bool], **changes: Any) -> Any:
    """Return a tiny GPTModel of the local spec. :param flags: attributes that flags of Megatron set on its config."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = dict(num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=2, ffn_hidden_size=2 * WIDTH)
    options = dict(use_cpu_initialization=True, init_method_std=0.1, pipeline_dtype=torch.float32)
    options |= dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    options |= dict(attention_dropout=0.0, hidden_dropout=0.0)
    config = TransformerConfig(**sizes, **options, **changes)
    for name, value in flags.items():
        setattr(config, name, value)
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    options = dict(position_embedding_type="rope", share_embeddings_and_output_weights=False)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, **options)


if __name__ == "__main__":
    sys.exit(main())
