"""``olmo-lns data``: fetch, make, turn and check tokenised training data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

from olmo_lns.arguments import above_zero, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import pack
from olmo_lns.study.data import prepare
from olmo_lns.study.data.check import DTYPES, Data, check_file, find, held_out
from olmo_lns.study.data.corpora import DOLMA
from olmo_lns.study.data.fetch import HELDOUT, fetch, read_list, to_megatron

__all__ = ["main"]


def _path(text: str) -> Path:
    if not text.strip():  # Path("") would be the present folder
        raise argparse.ArgumentTypeError("the path is empty: is the variable on the command line set?")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 1 when a checked file has a problem or the tokens do not reach the budget."""
    parser = argparse.ArgumentParser(prog="olmo-lns data", description="Make and check tokenised training data.")
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser(
        "check", help="dtype, size, vocabulary range and number of tokens; exit code 1 when something is wrong"
    )
    command.add_argument("paths", nargs="+", type=_path, help="folders (searched recursively) or files")
    command.add_argument("--dtype", choices=DTYPES, default=DOLMA.dtype, help="of the .npy files, as data.memmap_dtype")
    command.add_argument(
        "--vocab-size", type=at_least(1), default=DOLMA.vocabulary, help="default %(default)s, the shipped configs'"
    )
    eos = "end-of-document token (default %(default)s)"
    command.add_argument("--eos", type=int, default=DOLMA.eos, help=f"{eos}; -1: none")
    need = "; 0: do not compare"
    command.add_argument(
        "--budget", type=float, help=f"tokens to train on, without padding (default 20e9, with --rows 0){need}"
    )
    command.add_argument("--rows", type=at_least(0), default=0, help=f"sequences a run reads: steps × batch{need}")
    command.add_argument("--sequence", type=at_least(1), default=4096, help="sequence length (default 4096)")
    command = commands.add_parser("fetch", help="fetch a list of tokenised files, as much of each as is needed")
    command.add_argument("list", help="a file, or one of the pack by its name: dolma")
    command.add_argument("--tokens", type=above_zero, default=20e9, help="of training text (default 20e9)")
    command.add_argument("--heldout", type=above_zero, default=2e6, help="of held-out text (default 2e6)")
    command.add_argument("--stream", action="store_true", help="held-out text only: OLMo reads the other itself")
    command.add_argument("-o", "--out", type=Path, required=True, help="folder")
    prepare.arguments(
        commands.add_parser(
            "prepare",
            help="tokenise C4, text or JSON lines",
            description="Tokenise text into OLMo's memmaps. The same command goes on where it was stopped.",
            epilog="the papers' C4: olmo-lns data prepare c4 train --tokenizer t5-base --layout rows --sequence 256 "
            "--eos '</s>' --pad '<pad>' --out c4",
        )
    )
    command = commands.add_parser("megatron", help="turn OLMo's memmaps (uint16) into Megatron's .bin and .idx")
    command.add_argument("paths", nargs="+", type=Path, help="folders or .npy files")
    command.add_argument("--eos", type=int, default=DOLMA.eos, help=eos)
    command.add_argument("-o", "--out", type=Path, required=True, help="folder")
    args = parser.parse_args(argv)
    return {"check": _check, "fetch": _fetch, "prepare": prepare.run, "megatron": _megatron}[args.command](args)


def _fetch(args: argparse.Namespace) -> int:
    files = read_list(pack.located(args.list, "data"))
    args.out.mkdir(parents=True, exist_ok=True)
    heldout = {name: url for name, url in files.items() if name.startswith(HELDOUT)}
    training = {name: url for name, url in files.items() if name not in heldout}
    fetch(heldout, args.out, args.heldout)
    if args.stream:
        print(f"--data.paths=[{','.join(training.values())}]")
    else:
        fetch(training, args.out, args.tokens)
    print(f"export OLMO_DATA_DIR={args.out.resolve()}")
    return 0


def _megatron(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    words = []
    for path in (path for path in find(args.paths) if path.suffix == ".npy" and not held_out(path)):
        if problems := check_file(path, dtype=DOLMA.dtype, vocab_size=1 << 16, eos=args.eos).problems:
            raise LNSConfigError(f"{path}: {problems[0]}")
        prefix, count = to_megatron(path, args.out, args.eos)
        words += [str(count), str(prefix.resolve())]
    print(f'export MEGATRON_DATA="{" ".join(words)}"')
    return 0


def _check(args: argparse.Namespace) -> int:
    eos = args.eos if args.eos >= 0 else None
    found = find(args.paths)
    results = [check_file(path, dtype=args.dtype, vocab_size=args.vocab_size, eos=eos) for path in found]
    budget = args.budget if args.budget is not None else 0 if args.rows else 20e9
    return _report(results, budget, args.rows, args.sequence)


def _report(results: Sequence[Data], budget: float, rows: int, sequence: int) -> int:
    for result in results:
        labels = "" if result.labels is None else f", {result.labels:,} with a label"
        ids = f"ids {result.lowest}…{result.highest}, {result.documents:,} documents{labels}"
        print(f"{result.path}: {result.dtype}, {result.tokens:,} tokens, {ids}")
        for problem in result.problems:
            print(f"{result.path}: PROBLEM: {problem}")
    # OLMo drops the rest of a file that does not fill a sequence; padding has no label; nobody trains on held-out text.
    trained = [r for r in results if not r.problems and not held_out(r.path)]
    sequences = sum(r.tokens // sequence for r in trained)
    usable = sum(r.tokens // sequence * sequence if r.labels is None else r.labels for r in trained)
    kinds = {result.dtype for result in results}
    bad = sum(bool(result.problems) for result in results)
    if len(kinds) > 1:
        print(f"PROBLEM: more than one dtype: {', '.join(sorted(kinds))}; a config names one")
        bad += 1
    print(
        f"{len(results)} files, {usable:,} tokens to train on in {sequences:,} sequences of {sequence}, {bad} problems"
    )
    for wanted, found, what in ((budget, usable, "tokens"), (rows, sequences, "sequences")):
        if wanted:
            word = (
                "enough"
                if found >= wanted
                else f"short: the run would read the data {wanted / max(1, found):.3g} times"
            )
            print(f"wanted {wanted:,.0f} {what}: {word if found else 'there are none'}")
            bad += found < wanted
    return int(bad > 0)
