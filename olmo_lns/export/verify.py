"""``olmo-lns verify``: run a checkpoint and its export on the same prompts and compare.

The checkpoint runs with the factor, in OLMo with this plugin (a Megatron or the authors'
checkpoint: its unfolded weights in a Llama whose block norms are multiplied by a hook). The
export runs in the class its config names, which knows nothing of the factor.

Passes when, with an fp32 export, no logit is off by more than 1e-5 of the largest; with a bf16 or
fp16 export, by more than twice what running the checkpoint itself in that dtype costs.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence
from unittest import mock

from olmo_lns.errors import LNSConfigError

__all__ = ["Comparison", "compare", "main"]

#: Largest logit difference in fp32, relative to the largest logit.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Comparison:
    """:param difference: max |Δ logit|, and ``allowed`` what it may be.
    :param agreement: fraction of positions with the same most likely token.
    :param perplexities: of the checkpoint and of the export, on the prompts.
    """

    difference: float
    allowed: float
    agreement: float
    perplexities: tuple[float, float]
    positions: int

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed  # false for NaN

    def __str__(self) -> str:
        before, after = self.perplexities
        return (
            f"positions compared      {self.positions}\n"
            f"max |difference|, logit {self.difference:.3e} (allowed {self.allowed:.3e})\n"
            f"top-1 agreement         {self.agreement:.2%}\n"
            f"perplexity              {before:.4f} checkpoint, {after:.4f} export\n"
            f"{'PASS' if self.passed else 'FAIL'}"
        )


def main(argv: Sequence[str]) -> int:
    """Exit code 0: the export computes what the checkpoint computes; 1: it does not."""
    args = _parser().parse_args(argv)
    import torch

    from olmo_lns.export.atomic import verify_checksums

    files = verify_checksums(args.export)
    print(f"checksums               {f'{files} files match' if files else 'none in this folder'}")
    exported, vocabulary = _export_model(Path(args.export))
    source = _source_model(Path(args.checkpoint), args)
    batches = _prompts(args, vocabulary)
    with torch.inference_mode():
        result = compare(source, exported, batches)
    print(result)
    return 0 if result.passed else 1


def compare(source: Any, exported: Any, batches: Any) -> Comparison:
    """Run both on ``batches`` (int64, (count, length)), one prompt at a time.

    :param source: a module in fp32.
    :param exported: a module in the dtype to judge.
    """
    import torch

    dtype = next(exported.parameters()).dtype
    low = None if dtype == torch.float32 else copy.deepcopy(source).to(dtype)
    difference = gap = largest = 0.0
    agree, losses, count = 0, [0.0, 0.0], 0
    for ids in batches.split(1):
        expected, found = _logits(source, ids), _logits(exported, ids)
        difference = max(difference, _max(expected - found))
        largest = max(largest, _max(expected))
        if low is not None:
            gap = max(gap, _max(_logits(low, ids) - expected))
        agree += int((expected.argmax(-1) == found.argmax(-1)).sum())
        for index, logits in enumerate((expected, found)):
            losses[index] += _loss(logits, ids)
        count += ids.numel()
    allowed = TOLERANCE * largest if low is None else 2 * gap
    predicted = count - len(batches)
    before, after = (math.exp(min(loss / predicted, 700.0)) for loss in losses)
    return Comparison(difference, allowed, agree / count, (before, after), count)


def _max(values: Any) -> float:
    maximum = float(values.abs().max())
    return math.inf if math.isnan(maximum) else maximum  # max(0.0, nan) would hide it


def _logits(model: Any, ids: Any) -> Any:
    return model(ids).logits.double()


def _loss(logits: Any, ids: Any) -> float:
    import torch

    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))


def _export_model(folder: Path) -> tuple[Any, int]:
    """The export in stock code, and its number of tokens."""
    if (folder / "config.json").is_file():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto").eval()
        return model, model.config.vocab_size
    if (folder / "config.yaml").is_file():
        model, dtype = _olmo(folder)
        return model.to(dtype), model.config.vocab_size
    raise LNSConfigError(
        f"{folder} holds neither config.json nor config.yaml: verify reads Hugging Face and OLMo exports "
        "(a folded Megatron checkpoint can be exported with --format hf and verified so)"
    )


def _olmo(folder: Path) -> tuple[Any, Any]:
    """OLMo's model in fp32 and the dtype of its file; a folded checkpoint becomes the Pre-LN model it is.

    The exponent comes from the checkpoint's record, whatever this process is set to.
    """
    from olmo_lns.export.olmo import OLMoCheckpoint
    from olmo_lns.integrations.olmo import register
    from olmo_lns.settings import EXPONENT

    checkpoint = OLMoCheckpoint.open(folder)
    settings = {EXPONENT: repr(checkpoint.record.exponent)} if checkpoint.record.active else {}
    with mock.patch.dict(os.environ, settings):
        register()
        from olmo.config import ModelConfig
        from olmo.model import OLMo

        config = ModelConfig.load(folder / "config.yaml", key="model", validate_paths=False)
        config.init_device, config.block_group_size = "cpu", 1
        model = OLMo(config, init_params=False)
    # Not OLMo.from_checkpoint: it cannot read sharded checkpoints under newer versions of torch.
    model.load_state_dict({name: tensor.load().float() for name, tensor in checkpoint.tensors.items()})
    return model.float().eval(), next(iter(checkpoint.tensors.values())).dtype


def _source_model(folder: Path, args: argparse.Namespace) -> Any:
    """The checkpoint with its factor, in fp32."""
    from olmo_lns.export import authors, megatron
    from olmo_lns.export.hooked import hooked_llama
    from olmo_lns.export.olmo import is_olmo

    if args.source == "authors":
        return hooked_llama(*authors.unfolded(folder), exponent=0.5)
    if is_olmo(folder):
        return _olmo(folder)[0]
    if megatron.is_megatron(folder):
        checkpoint = megatron.MegatronCheckpoint.open(folder)
        exponent = checkpoint.record.exponent if checkpoint.record.active else 0.0
        return hooked_llama(*checkpoint.as_olmo(), exponent=exponent)
    raise LNSConfigError(f"{folder} is not an OLMo or Megatron checkpoint (the authors' LLaMA: --source authors)")


def _prompts(args: argparse.Namespace, vocabulary: int) -> Any:
    import torch

    if not args.text:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(0, vocabulary, (args.prompts, args.length), generator=generator)
    path = Path(args.export) / "tokenizer.json"
    if not path.is_file():
        raise LNSConfigError(f"{path} does not exist: --text needs an export with its tokenizer")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    ids = tokenizer.encode(Path(args.text).read_text(encoding="utf-8"), add_special_tokens=False).ids
    count = min(args.prompts, len(ids) // args.length)
    if not count:
        raise LNSConfigError(f"{args.text} has {len(ids)} tokens, fewer than one prompt of {args.length}")
    return torch.tensor(ids[: count * args.length]).view(count, args.length)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", help="the LNS checkpoint")
    add("export", help="what olmo-lns export made of it")
    add("--source", choices=("auto", "authors"), default="auto", help="'authors': a LLaMA of the paper's code")
    add("--text", help="file to take the prompts from, with the export's tokenizer; default: random tokens")
    add("--prompts", type=int, default=8, help="how many (default 8)")
    add("--length", type=int, default=64, help="tokens of each (default 64)")
    add("--seed", type=int, default=0, help="of the random tokens")
    return parser
