"""`olmo-lns data check` and `data megatron`: good files pass, each kind of bad file is named, Megatron reads what was written."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data.commands import main
from olmo_lns.study.engines.megatron import to_flags

EOS = 50279


def tokens(count=10_000, vocabulary=50_000):
    ids = np.random.default_rng(0).integers(5, vocabulary, count)
    ids[99::100] = EOS
    return ids


def check(path, *words, capsys):
    code = main(["check", str(path), *words])
    return code, capsys.readouterr().out


def test_good_files_pass_without_a_budget_and_their_tokens_are_counted(tmp_path, capsys):
    (tmp_path / "deep").mkdir()
    for name in ("a.npy", "deep/b.npy"):
        tokens().astype(np.uint16).tofile(tmp_path / name)
    code, text = check(tmp_path, capsys=capsys)
    assert code == 0 and text.count("10,000 tokens") == 2 and "100 documents" in text
    assert "2 files, 16,384 tokens to train on" in text  # the rest of each file fills no sequence


def test_the_budget_is_compared_with_the_tokens_that_are_trained_on(tmp_path, capsys):
    """Held-out text and padding do not count; a run that reads rows is compared by rows."""
    for name in ("a.npy", "validation-00000.npy", "heldout/b.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tokens(8192).astype(np.uint16).tofile(tmp_path / name)
    code, text = check(tmp_path, "--budget", "20e9", capsys=capsys)
    assert code == 1 and "needs 20,000,000,000 tokens. It would read these data 2.44e+06 times" in text
    assert check(tmp_path, "--budget", "8192", capsys=capsys)[0] == 0
    mask = np.arange(8192) % 4 > 0
    mask.tofile(tmp_path / "a.mask")
    assert check(tmp_path, "--budget", "8192", capsys=capsys)[0] == 1
    assert check(tmp_path, "--budget", "6144", "--rows", "32", "--sequence", "256", capsys=capsys)[0] == 0
    assert check(tmp_path, "--rows", "64", "--sequence", "256", capsys=capsys)[0] == 1
    mask[:-1].tofile(tmp_path / "a.mask")
    assert "a.mask has 8,191 positions, but the file has 8,192 tokens" in check(tmp_path, capsys=capsys)[1]


@pytest.mark.parametrize(
    ("write", "words", "message"),
    [
        (
            lambda p: tokens().astype("u4").tofile(p),
            (),
            "Every second token is 0 or close to 0. .* wider dtype than uint16",
        ),
        (lambda p: tokens().astype("u8").tofile(p), ("--dtype", "uint32"), "wider dtype than uint32"),
        (lambda p: tokens().astype("u2").tofile(p), ("--dtype", "uint32"), "outside the vocabulary .* is not uint32"),
        (lambda p: tokens().astype(">u2").tofile(p), (), "outside the vocabulary"),
        (
            lambda p: p.write_bytes(tokens().astype("u2").tobytes()[:-1]),
            (),
            "19,999 bytes, which is not a multiple of 2",
        ),
        (lambda p: np.save(p, tokens().astype("u2")), (), "has a NumPy header"),
        (lambda p: np.full(999, 7, "u2").tofile(p), (), "end-of-document token 50279 never occurs"),
        (lambda p: p.touch(), (), "The file is empty"),
        (lambda p: p.symlink_to("nowhere"), (), "No such file"),
    ],
)
def test_a_bad_file_is_named(tmp_path, capsys, write, words, message):
    path = tmp_path / "a.npy"
    write(path)
    code, text = check(tmp_path, *words, capsys=capsys)
    assert code == 1
    (problem,) = [line for line in text.splitlines() if "PROBLEM" in line]
    assert re.search(message, problem) and str(path) in problem


def test_the_record_beside_a_file_says_its_dtype_and_vocabulary(tmp_path, capsys):
    ids = tokens(vocabulary=128_000).astype(np.uint32)
    ids.tofile(tmp_path / "train-00000.npy")
    (tmp_path / "train.json").write_text(json.dumps({"dtype": "uint32", "vocabulary": 128_000, "eos": EOS}))
    code, text = check(tmp_path, capsys=capsys)
    assert code == 0 and "uint32, 10,000 tokens" in text
    assert main(["megatron", str(tmp_path), "-o", str(tmp_path / "m")]) == 0
    data = IndexedDataset(str(tmp_path / "m" / "train-00000"))
    assert len(data) == 100 and np.concatenate([data[n] for n in range(100)]).tolist() == ids.tolist()
    assert "wider dtype than uint16" in check(tmp_path / "train-00000.npy", "--dtype", "uint16", capsys=capsys)[1]
    tokens().astype(np.uint16).tofile(tmp_path / "train-00000.npy")  # no longer what its record says
    with pytest.raises(LNSConfigError, match="outside the vocabulary"):
        main(["megatron", str(tmp_path), "-o", str(tmp_path / "m")])
    for record in ({"dtype": "uint15"}, {"eos": None}):
        (tmp_path / "train.json").write_text(json.dumps(record))
        code, text = check(tmp_path / "train-00000.npy", capsys=capsys)
        assert code == 1 and "train-00000.npy: PROBLEM" in text


def test_files_of_one_name_keep_apart(tmp_path, capsys):
    """Named one by one or by their folder."""
    names = ("a.npy", "a/a.npy", "a/a/a.npy", "part.0.npy", "part.1.npy")
    counts = {name: 1000 * number for number, name in enumerate(names, start=1)}
    for name, count in counts.items():
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        tokens(count).astype(np.uint16).tofile(tmp_path / "in" / name)
    for words in ([str(tmp_path / "in")], [str(path) for path in sorted((tmp_path / "in").rglob("*.npy"))]):
        out = tmp_path / f"out{len(words)}"
        assert main(["megatron", *words, "-o", str(out)]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        for name, count in counts.items():
            prefix = f"{out}/{name.removesuffix('.npy')}"
            assert f"{count} {prefix}" in line and os.path.getsize(f"{prefix}.bin") == 2 * count
        assert main(["check", str(out), "--sequence", "100"]) == 0
        assert f"{len(names)} files" in capsys.readouterr().out


def test_links_among_the_data_are_followed_once(tmp_path, capsys):
    (tmp_path / "store").mkdir()
    (tmp_path / "data").mkdir()
    tokens().astype(np.uint16).tofile(tmp_path / "store" / "a.npy")
    (tmp_path / "data" / "b.npy").symlink_to("../store/a.npy")
    (tmp_path / "data" / "again.npy").symlink_to(tmp_path / "store" / "a.npy")
    (tmp_path / "data" / "up").symlink_to("..")
    (tmp_path / "other").symlink_to("data")
    for path in ("data", "other"):
        assert main(["megatron", str(tmp_path / path), "-o", str(tmp_path / f"m-{path}")]) == 0
    assert capsys.readouterr().out.count("10000 ") == 2
    assert main(["check", str(tmp_path / "other")]) == 0
    (binary,) = (tmp_path / "m-data").rglob("*.bin")
    assert not binary.is_symlink() and binary.stat().st_size == 20_000


@pytest.mark.parametrize("out", ["with blank", "tab\tin", "line\nbreak", "quote'd", "$HOME", "back\\slash"])
def test_a_path_that_megatron_would_split_is_refused(tmp_path, out):
    tokens().astype(np.uint16).tofile(tmp_path / "a.npy")
    with pytest.raises(LNSConfigError, match="cannot be passed to Megatron, which splits --data-path"):
        main(["megatron", str(tmp_path / "a.npy"), "-o", str(tmp_path / out)])
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize("out", ["a;b", "a&b", "a*[b]", "#a", "(a)", "~a", "a,b:c", "größe"])
def test_a_path_that_a_shell_would_split_reaches_megatron_whole(tmp_path, out, capsys, monkeypatch):
    """By the printed line, in a shell, and the flags of a config that reads the variable."""
    tokens(1000).astype(np.uint16).tofile(tmp_path / "a.npy")
    assert main(["megatron", str(tmp_path / "a.npy"), "-o", str(tmp_path / out)]) == 0
    script = capsys.readouterr().out + 'printf %s "$MEGATRON_DATA"'
    value = subprocess.run([shutil.which("bash"), "-c", script], capture_output=True, text=True).stdout
    monkeypatch.setenv("MEGATRON_DATA", value)
    flags = to_flags({"data_path": "${oc.env:MEGATRON_DATA}"})
    assert flags == ["--data-path", "1000", f"{tmp_path}/{out}/a"] and os.path.isfile(f"{flags[2]}.bin")


def test_files_of_megatron_are_read_and_damage_is_named(tmp_path, capsys):
    path, index = tmp_path / "x.bin", tmp_path / "x.idx"
    builder = IndexedDatasetBuilder(str(path), dtype=np.uint16)
    for length in (300, 700):
        builder.add_document(torch.from_numpy(tokens(length).astype(np.int64)), [length])
    builder.finalize(str(index))
    for named in (tmp_path, index):
        code, text = check(named, capsys=capsys)
        assert code == 0 and "uint16, 1,000 tokens" in text and "2 documents" in text
    code, text = check(tmp_path, "--eos", "3", capsys=capsys)
    assert code == 1 and "x.bin: PROBLEM: The end-of-document token 3 never occurs" in text
    assert check(tmp_path, "--eos", "-1", capsys=capsys)[0] == 0
    path.write_bytes(path.read_bytes()[:-2])
    code, text = check(path, capsys=capsys)
    assert code == 1 and "1,998 bytes, but its index counts 2,000. The file was cut" in text
    index.write_bytes(index.read_bytes()[:40])
    assert "Megatron cannot read the index: buffer" in check(path, capsys=capsys)[1]
    index.write_bytes(b"something else that is long enough to read")
    assert "Megatron cannot read the index: bad header" in check(path, capsys=capsys)[1]
    index.unlink()
    assert "has no .idx beside it" in check(path, capsys=capsys)[1]
