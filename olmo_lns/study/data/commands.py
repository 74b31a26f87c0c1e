"""``olmo-lns data``: fetch, make, convert and check tokenized training data."""

from __future__ import annotations

import argparse
import shlex
from typing import Sequence

from olmo_lns.arguments import Parser, as_path, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.bundled_configs import find_config
from olmo_lns.study.data import check, indexed, prepare
from olmo_lns.study.data.corpora import DOLMA


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``olmo-lns data``.

    :returns: the exit code: 1 if ``check`` finds a problem, or too few tokens or sequences, else 0.
    """
    parser = Parser(prog="olmo-lns data", description="Make and check tokenized training data.")
    commands = parser.add_subparsers(required=True, dest="command")
    checking = commands.add_parser(
        "check", help="check dtype, size, token ids and number of tokens (exit code 1 if there is a problem)"
    )
    checking.add_argument("--budget", type=float, default=0, help="tokens to train on, without padding, such as 20e9")
    checking.add_argument("--rows", type=float, default=0, help="number of sequences that a run reads: steps × batch")
    checking.add_argument("--sequence", type=at_least(1), default=4096, help="sequence length (default 4096)")
    fetching = commands.add_parser("fetch", help="fetch the needed part of each tokenized file in a list")
    fetching.add_argument("list", help="a file, or a name in the pack: dolma")
    fetching.add_argument("--tokens", type=float, default=20e9, help="tokens of training text (default 20e9)")
    fetching.add_argument("--heldout", type=float, default=2e6, help="tokens of held-out text (default 2e6)")
    fetching.add_argument("-o", "--out", type=as_path, required=True, help="folder")
    prepare.arguments(
        commands.add_parser(
            "prepare",
            help="tokenize C4 as in the papers",
            description="Tokenize C4 into OLMo's memmaps, one row a document. No partial files are left.",
            epilog="the papers' C4: olmo-lns data prepare c4 train --tokenizer t5-base "
            "--eos '</s>' --pad '<pad>' --out c4",
        )
    )
    converting = commands.add_parser("megatron", help="convert OLMo's memmaps to Megatron's .bin and .idx")
    converting.add_argument("-o", "--out", type=as_path, required=True, help="folder")
    for command in (checking, converting):
        command.add_argument("paths", nargs="+", type=as_path, help="folders (searched recursively) or files")
        command.add_argument(
            "--dtype", choices=check.DTYPES, help="dtype of the .npy files (default: of the record, else uint16)"
        )
        command.add_argument("--vocab-size", type=int, help=f"default: of the record, else {DOLMA.vocabulary}")
        command.add_argument(
            "--eos",
            type=int,
            help=f"id of the end of a document, or -1 for none (default: of the record, else {DOLMA.eos})",
        )
    args = parser.parse_args(argv)
    return {"check": _check, "fetch": _fetch, "prepare": prepare.run, "megatron": _megatron}[args.command](args)


def _fetch(args: argparse.Namespace) -> int:
    from olmo_lns.study.data.fetch import HELDOUT, fetch, read_list

    files = read_list(find_config(args.list, "data"))
    if min(args.tokens, args.heldout) <= 0:
        raise LNSConfigError(
            f"--tokens is {args.tokens:g} and --heldout is {args.heldout:g}. Both must be above 0. Change the options."
        )
    heldout = {name: url for name, url in files.items() if name.startswith(HELDOUT)}
    training = {name: url for name, url in files.items() if name not in heldout}
    fetch(heldout, args.out, args.heldout)
    fetch(training, args.out, args.tokens)
    print(f"export OLMO_DATA_DIR={shlex.quote(str(args.out.resolve()))}")
    return 0


def _check(args: argparse.Namespace) -> int:
    results = [
        check.check_file(path, dtype=args.dtype, vocabulary=args.vocab_size, eos=args.eos)
        for path in check.find(args.paths)
    ]
    return int(check.print_files(results, args.budget, args.rows, args.sequence) > 0)


def _megatron(args: argparse.Namespace) -> int:
    print(indexed.write_pairs(args.paths, args.out, eos=args.eos, dtype=args.dtype, vocabulary=args.vocab_size))
    return 0
