"""`olmo-lns data check`: good files of tokens pass, and each kind of bad file is named."""

import re

import numpy as np
import pytest

from olmo_lns.study.data import commands as data_check

EOS = 50279


def tokens(count=10_000):
    ids = np.random.default_rng(0).integers(5, 50_000, count)
    ids[99::100] = EOS
    return ids


def check(path, *words, capsys):
    code = data_check.main(["check", str(path), "--budget", "0", *words])
    return code, capsys.readouterr().out


def test_good_files_pass_and_their_tokens_are_counted(tmp_path, capsys):
    (tmp_path / "deep").mkdir()
    for name in ("a.npy", "deep/b.npy"):
        tokens().astype(np.uint16).tofile(tmp_path / name)
    code, text = check(tmp_path, "--sequence", "4096", capsys=capsys)
    assert code == 0 and text.count("10,000 tokens") == 2 and "100 documents" in text
    assert "2 files, 16,384 tokens to train on" in text  # the rest of each file fills no sequence


def test_the_budget_is_compared_with_the_tokens_that_are_trained_on(tmp_path, capsys):
    """Held-out text and padding do not count; a run that reads rows is compared by rows."""
    for name in ("a.npy", "validation-00000.npy", "heldout/b.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tokens(8192).astype(np.uint16).tofile(tmp_path / name)
    assert data_check.main(["check", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "wanted 20,000,000,000 tokens: short: the run would read the data 2.44e+06 times" in text
    assert data_check.main(["check", str(tmp_path), "--budget", "8192"]) == 0
    mask = np.arange(8192) % 4 > 0
    mask.tofile(tmp_path / "a.mask")
    assert data_check.main(["check", str(tmp_path), "--budget", "8192"]) == 1
    assert "wanted 8,192 tokens: short: the run would read the data 1.33 times" in capsys.readouterr().out
    assert data_check.main(["check", str(tmp_path), "--budget", "6144", "--rows", "32", "--sequence", "256"]) == 0
    assert data_check.main(["check", str(tmp_path), "--rows", "64", "--sequence", "256"]) == 1
    assert "wanted 64 sequences: short: the run would read the data 2 times" in capsys.readouterr().out
    mask[:-1].tofile(tmp_path / "a.mask")
    assert "a.mask has 8,191 positions, the file 8,192 tokens" in check(tmp_path, capsys=capsys)[1]


@pytest.mark.parametrize(
    ("write", "words", "message"),
    [
        (lambda p: tokens().astype("u4").tofile(p), (), "every second token is 0: the file looks like a wider dtype"),
        (lambda p: tokens().astype("u2").tofile(p), ("--dtype", "uint32"), "outside the vocabulary .* not uint32"),
        (lambda p: p.write_bytes(tokens().astype("u2").tobytes()[:-1]), (), "19,999 bytes are no multiple of 2"),
        (lambda p: np.save(p, tokens().astype("u2")), (), "has a NumPy header"),
        (lambda p: (tokens() + 9000).astype("u2").tofile(p), (), "token 59,279 is outside the vocabulary of 50,280"),
        (lambda p: np.full(999, 7, "u2").tofile(p), (), "end-of-document token 50279 never occurs"),
        (lambda p: p.touch(), (), "is empty"),
    ],
    ids=["uint32 read as uint16", "uint16 read as uint32", "truncated", "np.save", "vocabulary", "no eos", "empty"],
)
def test_a_bad_file_is_named(tmp_path, capsys, write, words, message):
    path = tmp_path / "a.npy"
    write(path)
    code, text = check(path, *words, capsys=capsys)
    assert code == 1
    (problem,) = [line for line in text.splitlines() if "PROBLEM" in line]
    assert re.search(message, problem) and str(path) in problem


def test_files_of_megatron_are_read_and_damage_is_named(tmp_path, capsys):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    path, index = tmp_path / "x.bin", tmp_path / "x.idx"
    builder = IndexedDatasetBuilder(str(path), dtype=np.uint16)
    for length in (300, 700):
        builder.add_document(torch.from_numpy(tokens(length).astype(np.int64)), [length])
    builder.finalize(str(index))
    for named in (tmp_path, index):
        code, text = check(named, capsys=capsys)
        assert code == 0 and "uint16, 1,000 tokens" in text and "2 documents" in text
    code, text = check(tmp_path, "--eos", "3", capsys=capsys)
    assert code == 1 and "x.bin: PROBLEM: the end-of-document token 3 never occurs" in text and "2 documents" in text
    assert check(tmp_path, "--eos", "-1", capsys=capsys)[0] == 0
    path.write_bytes(path.read_bytes()[:-2])
    code, text = check(path, capsys=capsys)
    assert code == 1 and "1,998 bytes, but its index counts 2,000: truncated" in text
    index.write_bytes(index.read_bytes()[:40])
    assert "x.idx: version 1, dtype code 8, 40 of" in check(path, capsys=capsys)[1]
    index.write_bytes(b"something else that is long enough to read")
    assert "does not start with Megatron's index header" in check(path, capsys=capsys)[1]
    index.unlink()
    assert "has no x.idx beside x.bin" in check(path, capsys=capsys)[1]
