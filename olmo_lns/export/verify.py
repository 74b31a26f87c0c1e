"""``olmo-lns verify``: run a checkpoint and its export on the same prompts and compare.

The checkpoint runs with the factor, in OLMo with this plugin (a Megatron or the authors'
checkpoint: its unfolded weights in a Llama whose block norms are multiplied by a hook; a model
folder of ours: in our class of it). The export runs in stock software: in the transformers class
its config names, or in OLMo in a process of its own without this plugin. What `olmo-lns hf import`
made of a checkpoint can stand in its place; it runs in our class. Image models get random images.

Passes when every weight is the checkpoint's, folded anew, within one rounding of its dtype; when the
config says the same of everything that changes a function; and when every logit is finite and, with an
fp32 export, none is off by more than 1e-5 of the largest; with a bf16 or fp16 export, by more than twice
what running the checkpoint itself in that dtype costs.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Sequence

from olmo_lns.arguments import at_least, seed
from olmo_lns.errors import LNSConfigError

__all__ = ["Comparison", "compare", "main"]

#: Largest logit difference in fp32, relative to the largest logit.
TOLERANCE = 1e-5
#: Differences of weights and config that are named.
_SHOWN = 10


@dataclass(frozen=True)
class Comparison:
    """:param difference: max |Δ logit|, and ``allowed`` what it may be.
    :param agreement: fraction of positions with the same most likely token.
    :param perplexities: of the checkpoint and of the export, on the prompts; None for images.
    :param not_finite: which model has NaN or infinite logits, and the first of its layers that has; then nothing
        was compared.
    :param different: what of weights and config is not what folding the checkpoint anew gives.
    :param text: what the perplexities are of.
    """

    difference: float = math.inf
    allowed: float = 0.0
    agreement: float = 0.0
    perplexities: tuple[float, float] | None = None
    positions: int = 0
    not_finite: str = ""
    different: tuple[str, ...] = ()
    text: str = ""

    @property
    def passed(self) -> bool:
        return (
            not self.not_finite
            and not self.different
            and math.isfinite(self.allowed)
            and self.difference <= self.allowed
        )

    def __str__(self) -> str:
        lines = [f"differs                 {line}" for line in self.different[:_SHOWN]]
        if len(self.different) > _SHOWN:
            lines.append(f"differs                 … and {len(self.different) - _SHOWN} more")
        if self.not_finite:
            return "\n".join([*lines, f"not finite              {self.not_finite}", "FAIL"])
        lines += [
            f"positions compared      {self.positions}",
            f"max |difference|, logit {self.difference:.3e} (allowed {self.allowed:.3e})",
            f"top-1 agreement         {self.agreement:.2%}",
        ]
        if self.perplexities is not None:
            before, after = self.perplexities
            of = f", of {self.text}" if self.text else ""
            lines.append(f"perplexity              {before:.4f} checkpoint, {after:.4f} export{of}")
        return "\n".join([*lines, "PASS" if self.passed else "FAIL"])


def main(argv: Sequence[str]) -> int:
    """Exit code 0: the export computes what the checkpoint computes; 1: it does not."""
    args = _parser().parse_args(argv)
    import torch

    from olmo_lns.checkpoints.records import record_in
    from olmo_lns.export.atomic import verify_checksums
    from olmo_lns.export.sources import source_of
    from olmo_lns.export.stock import open_export
    from olmo_lns.export.verify_files import differences

    if os.path.realpath(args.checkpoint) == os.path.realpath(args.export):
        raise LNSConfigError(f"{args.export} is the checkpoint itself: give what olmo-lns export made of it")
    files = verify_checksums(args.export)
    print(f"checksums               {f'{files} files match' if files else 'none in this folder'}")
    checkpoint, export = Path(args.checkpoint), Path(args.export)
    exported, vocabulary, longest = open_export(export)
    images = getattr(exported, "main_input_name", "") == "pixel_values"
    batches = _images(args, exported.config) if images else _prompts(args, vocabulary, longest)
    source, said = source_of(checkpoint, args.source), record_in(export)
    with torch.inference_mode():
        result = compare(source.model(checkpoint, said), exported, batches)
    count, different = differences(source, checkpoint, export, said)
    print(f"weights                 {count} compared with the checkpoint's, folded anew")
    text = args.text or f"random tokens (seed {args.seed})"
    result = replace(result, different=tuple(different), text=text)
    print(result)
    return 0 if result.passed else 1


class _NotFinite(Exception):
    pass


def compare(source: Any, exported: Any, batches: Any) -> Comparison:
    """Run both on ``batches`` (int64, (count, length), or images), one at a time.

    :param source: a module in fp32.
    :param exported: a module in the dtype to judge, or :class:`olmo_lns.export.stock.StockOLMo`.
    """
    try:
        return _compare(source, exported, batches)
    except _NotFinite as error:
        return Comparison(not_finite=str(error))


def _compare(source: Any, exported: Any, batches: Any) -> Comparison:
    import torch

    dtype = next(exported.parameters()).dtype if isinstance(exported, torch.nn.Module) else exported.dtype
    low = None if dtype == torch.float32 else copy.deepcopy(source).to(dtype)
    difference = gap = largest = 0.0
    agree, losses, count, text = 0, [0.0, 0.0], 0, not batches.is_floating_point()
    answers = _answers(exported, batches)
    for ids in batches.split(1):
        try:
            expected, found = _logits(source, ids, "checkpoint"), next(answers)
        except IndexError:  # of the embedding
            raise LNSConfigError(
                f"the checkpoint has no token {int(ids.max())}: the export is of another model"
            ) from None
        if expected.shape != found.shape:
            raise LNSConfigError(
                f"the checkpoint has {expected.shape[-1]} logits a token, the export {found.shape[-1]}: it is of "
                "another model"
            )
        difference = max(difference, _max(expected - found))
        largest = max(largest, _max(expected))
        if low is not None:
            gap = max(gap, _max(_logits(low, ids, f"checkpoint run in {dtype}") - expected))
        agree += int((expected.argmax(-1) == found.argmax(-1)).sum())
        for index, logits in enumerate((expected, found) if text else ()):
            losses[index] += _loss(logits, ids)
        count += expected[..., 0].numel()
    allowed = TOLERANCE * largest if low is None else 2 * gap
    if not text:
        return Comparison(difference, allowed, agree / count, None, count)
    predicted = count - len(batches)
    before, after = (math.exp(min(loss / predicted, 700.0)) for loss in losses)
    return Comparison(difference, allowed, agree / count, (before, after), count)


def _max(values: Any) -> float:
    return float(values.abs().max())


def _answers(exported: Any, batches: Any) -> Iterator[Any]:
    """The export's logits of each prompt."""
    import torch

    if isinstance(exported, torch.nn.Module):
        yield from (_logits(exported, ids, "export") for ids in batches.split(1))
    else:
        yield from (_finite(found, "export") for found in exported.run(batches))


def _logits(model: Any, ids: Any, which: str) -> Any:
    from olmo_lns.export.stock_olmo import logits_of

    if ids.is_floating_point():  # images, in what the model computes in
        ids = ids.to(next(model.parameters()).dtype)
    return _finite(logits_of(model, ids), which)


def _finite(answer: tuple[Any, str | None], which: str) -> Any:
    """:raises _NotFinite: with ``which`` model it is and the first of its layers concerned."""
    logits, first = answer
    if first is not None:
        raise _NotFinite(f"{which}: NaN or infinite from {first} on")
    return logits.double()


def _loss(logits: Any, ids: Any) -> float:
    import torch

    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))


def _images(args: argparse.Namespace, config: Any) -> Any:
    import torch

    if args.text:
        raise LNSConfigError(f"--text: {args.export} reads images: it is compared on random ones")
    generator = torch.Generator().manual_seed(args.seed)
    return torch.randn(args.prompts, config.num_channels, config.image_size, config.image_size, generator=generator)


def _prompts(args: argparse.Namespace, vocabulary: int, longest: int) -> Any:
    import torch

    length = args.length or min(64, longest)
    if length > longest:
        raise LNSConfigError(f"--length {length}: the model takes at most {longest} tokens")
    if not args.text:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(0, vocabulary, (args.prompts, length), generator=generator)
    path = Path(args.export) / "tokenizer.json"
    if not path.is_file():
        raise LNSConfigError(f"{path} does not exist: --text needs an export with its tokenizer")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    ids = tokenizer.encode(Path(args.text).read_text(encoding="utf-8"), add_special_tokens=False).ids
    count = min(args.prompts, len(ids) // length)
    if not count:
        raise LNSConfigError(f"{args.text} has {len(ids)} tokens, fewer than one prompt of {length}")
    return torch.tensor(ids[: count * length]).view(count, length)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns verify",
        description=(__doc__ or "").replace("``", "`"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", help="the LNS checkpoint")
    add("export", help="what olmo-lns export made of it")
    add("--source", choices=("auto", "authors"), default="auto", help="'authors': a LLaMA of the paper's code")
    add("--text", help="file to take the prompts from, with the export's tokenizer; default: random tokens")
    add("--prompts", type=at_least(1), default=8, help="how many (default 8)")
    add("--length", type=at_least(2), help="tokens of each (default 64, or what the model takes)")
    add("--seed", type=seed, default=0, help="of the random tokens")
    return parser
