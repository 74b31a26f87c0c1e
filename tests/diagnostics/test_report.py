"""`olmo-lns analyze all`: a decoder, an LNS model and BERT on one page, and what could not run named there."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.diagnostic_models import huggingface

from olmo_lns.cli import main

pytest.importorskip("matplotlib")


@pytest.fixture
def tokens_file(tmp_path):
    path = tmp_path / "tokens.npy"
    np.random.default_rng(0).integers(4, 97, 4096).astype(np.uint16).tofile(path)
    return path


def test_one_page_for_three_models(llama_folder, bert_folder, tokens_file, tmp_path, capsys):
    from olmo_lns.integrations.transformers import apply

    apply(huggingface("llama")).save_pretrained(tmp_path / "lns")
    options = ["--only", "variance,layer-drop", "-o", str(tmp_path / "out"), "--labels", "Pre-LN,LNS,BERT"]
    more = ["--tokens", "256", "--sequence-length", "16", "--device", "cpu"]
    models = [str(llama_folder), str(tmp_path / "lns"), str(bert_folder)]
    assert main(["analyze", "all", *models, "--data", str(tokens_file), *options, *more, "--pdf"]) == 0
    assert (tmp_path / "out" / "report.pdf").read_bytes().count(b"/Type /Page ") == 4  # a figure and a table each
    said = capsys.readouterr()
    assert "report.html, " in said.out and said.out.count("| block | Pre-LN | LNS | BERT |") == 2
    assert said.err.count("LayerNorm Scaling on") == 2, "once when it was made, once when it was read"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img ") == page.count("<h2>") == page.count("<table>") == 2 and "Not run" not in page
    assert all(f"<p>{name}: " in page for name in ("Pre-LN", "LNS", "BERT"))
    found = [json.loads((tmp_path / "out" / f"variance-{number}.json").read_text()) for number in (1, 2, 3)]
    assert found[0] != found[1]


def test_what_did_not_run_is_on_the_page(llama_folder, tokens_file, tmp_path, capsys):
    models = [str(llama_folder), str(tmp_path / "nowhere")]
    options = ["--only", "variance", "-o", str(tmp_path / "out"), "--tokens", "64", "--device", "cpu"]
    assert main(["analyze", "all", *models, "--data", str(tokens_file), *options]) == 1
    assert f"not run: variance, {tmp_path / 'nowhere'}" in capsys.readouterr().out
    assert "<h2>Not run</h2>" in (tmp_path / "out" / "report.html").read_text()


def test_wrong_usage(tokens_file, tmp_path, capsys):
    command = ["analyze", "all", "a", "--data", str(tokens_file), "-o", str(tmp_path / "out")]
    assert main([*command, "--only", "varianz"]) == 1 and "unknown 'varianz'" in capsys.readouterr().err
    assert main([*command, "--labels", "x,y"]) == 1 and "found 2 names, expected 1" in capsys.readouterr().err
