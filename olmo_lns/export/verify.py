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
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.arguments import at_least, seed
from olmo_lns.errors import LNSConfigError

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Exit code 0: the export computes what the checkpoint computes; 1: it does not."""
    args = _parser().parse_args(argv)
    import torch

    from olmo_lns.checkpoints import record_in
    from olmo_lns.export.atomic import verify_checksums
    from olmo_lns.export.cli import source_of
    from olmo_lns.export.comparison import compare, differences, open_export

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
