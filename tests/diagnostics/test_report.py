"""`olmo-lns analyze all`: a decoder, an LNS model and BERT on one page, and what could not run named there."""

from __future__ import annotations

import json

import pytest
from support.diagnostic_models import huggingface

from olmo_lns.cli import main

pytest.importorskip("matplotlib")


def test_one_page_for_three_models(llama_folder, bert_folder, token_file, tmp_path, capsys):
    from olmo_lns.integrations.transformers import apply

    apply(huggingface("llama")).save_pretrained(tmp_path / "lns")
    models = f"{llama_folder} {tmp_path / 'lns'} {bert_folder} --labels Pre-LN,LNS,BERT"
    more = "--tokens 256 --sequence-length 16 --device cpu --only variance,layer-drop"
    assert main(f"analyze all {models} --data {token_file} -o {tmp_path / 'out'} {more}".split()) == 0
    said = capsys.readouterr()
    assert "report.html" in said.out and said.out.count("| block | Pre-LN | LNS | BERT |") == 2
    assert said.err.count("LayerNorm Scaling on") == 2, "once when it was made, once when it was read"
    assert "LNS: variance" in said.err and "BERT: layer-drop" in said.err, "what it does at the moment"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img ") == page.count("<h2>") == page.count("<table") == 2 and "Not run" not in page
    assert all(page.count(f"<p>{name}: ") == 1 for name in ("Pre-LN", "LNS", "BERT"))
    found = [json.loads((tmp_path / "out" / f"variance-{number}.json").read_text()) for number in (1, 2, 3)]
    assert found[0] != found[1]


def test_what_did_not_run_is_on_the_page_once(llama_folder, token_file, tmp_path, capsys):
    models = [str(llama_folder), str(tmp_path / "nowhere")]
    options = ["--only", "variance,angular", "-o", str(tmp_path / "out"), "--tokens", "64", "--device", "cpu"]
    assert main(["analyze", "all", *models, "--data", str(token_file), *options]) == 1
    assert capsys.readouterr().out.count(f"Not run: {tmp_path / 'nowhere'}: ") == 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h2>Not run</h2>" in page and page.count(f"{tmp_path / 'nowhere'}") == 2, "its name, and no such folder"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a --only varianz", "unknown 'varianz'"),
        ("a --labels x,y", "found 2 names, expected 1"),
        ("a b/a", "two of them have one label (a, a)"),
    ],
)
def test_wrong_usage_is_said_before_a_model_is_loaded(words, said, token_file, tmp_path, capsys):
    assert main(f"analyze all {words} --data {token_file} -o {tmp_path / 'out'}".split()) == 1
    assert said in capsys.readouterr().err
