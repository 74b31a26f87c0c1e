"""`olmo-lns analyze` on real checkpoints: result files, tables, figures, and one line for each error."""

import json
import math
from pathlib import Path

import pandas
import pytest
import torch
from support.diagnostic_models import huggingface

from olmo_lns import cli
from olmo_lns.arms import ARMS
from olmo_lns.diagnostics import DIAGNOSTICS, plots
from olmo_lns.diagnostics.layer_drop import bypassed
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.integrations.transformers import apply


def analyze(*arguments):
    return cli.main(["analyze", *map(str, arguments)])


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read once, at import
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)


def options(what):
    return ["--sequence-length", 16, "--batch-size", 4, *(["--sequences", 4] * (what == "jacobian"))]


@pytest.fixture(scope="module")
def results(tmp_path_factory, olmo_folder, llama_folder, token_file):
    """Run every diagnostic on an OLMo checkpoint with LNS and on a Llama: (what, model) -> result file."""
    folder, files = tmp_path_factory.mktemp("results"), {}
    for name, model in (("olmo", olmo_folder), ("llama", llama_folder)):
        for what in DIAGNOSTICS:
            path = files[what, name] = folder / name / f"{what}.json"
            words = ["--model", model, "--data", token_file, "-o", path, "--label", name]
            assert analyze(what, *words, *options(what)) == 0
    return files


@pytest.mark.parametrize("what", DIAGNOSTICS)
def test_results_are_read_back_and_compared_in_tables_and_figures(what, results, capsys):
    files = [results[what, "olmo"], results[what, "llama"]]
    result, other = map(Measurement.read, files)
    assert (result.what, result.label) == (what, "olmo")
    assert result.settings["sequence_length"] == 16 and result.settings["dtype"] == "float32"
    assert result.settings["scheme"] == "lns" and other.settings["scheme"] == "preln"
    assert result.tokens == {"jacobian": 4, "layer-drop": 562, "gradnorm": 562}.get(what, 600)
    rows = pandas.read_csv(files[0].with_suffix(".csv"))
    assert list(rows["block"]) == [1, 2, 3, 4] and list(rows) == list(result.frame())
    assert analyze("compare", *files, "-o", "x.png") == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["olmo", "llama"] in printed and ["1", f"{result.main[0]:.4g}", f"{other.main[0]:.4g}"] in printed
    assert Path("x.png").stat().st_size > 10_000


def test_a_stock_folder_is_measured_under_the_scheme_that_it_does_not_name(llama_folder, token_file, tmp_path):
    """Trained with LNS elsewhere: the norms of the stock class have no factor until ``--scheme`` says it."""
    apply(huggingface("llama"), initialization="upstream").save_pretrained(tmp_path / "own")
    found = []
    for folder, more in ((tmp_path / "own", []), (llama_folder, ["--scheme", "lns"]), (llama_folder, [])):
        words = ["--model", folder, "--data", token_file, *more, "-o", tmp_path / "out.json"]
        assert analyze("layer-drop", *words, *options("layer-drop")) == 0
        found.append(Measurement.read(tmp_path / "out.json"))
    assert found[0].blocks == found[1].blocks != found[2].blocks
    assert [result.settings["scheme"] for result in found] == ["lns", "lns", "preln"]


def test_figures_show_what_was_measured_in_the_colors_of_the_arms(results):
    for what in ("angular", "layer-drop"):
        measured = [Measurement.read(results[what, name]) for name in ("olmo", "llama")]
        axes = plots.draw(measured).axes
        lines = [container.lines[0] for container in axes[-1].containers]
        assert [list(line.get_ydata()) for line in lines] == [result.main for result in measured]
        assert [line.get_color() for line in lines] == [ARMS["lns"].color, ARMS["preln"].color]
        for axis, result in zip([axis for axis in axes if axis.images], measured, strict=False):
            assert axis.images[0].get_array()[2, 0] == result.blocks["d3"][0]


def test_a_model_keeps_the_color_of_its_arm_beside_others_of_the_same_arm_or_of_none():
    schemes = ("lns", "preln", "preln", "lns:exponent=0.7")
    measured = [Measurement("variance", 1, {"variance": [1.0]}, settings={"scheme": scheme}) for scheme in schemes]
    styles = plots.styles(measured)
    lns, preln = ARMS["lns"].color, ARMS["preln"].color
    assert [style["color"] for style in styles] == [lns, preln, preln, "black"]
    assert len({tuple(style.values()) for style in styles}) == 4


def accuracy(logits, documents):
    """Share of right answers, by one forward pass for each choice, without padding, cache or the harness."""
    right = []
    for document in documents:
        scores = []
        for choice in document["choices"]:
            words = [int(word[1:]) for word in [*document["question"].split(), choice]]
            scores.append(float(logits(torch.tensor([words[:-1]]))[0, -1].double().log_softmax(-1)[words[-1]]))
        right.append(scores.index(max(scores)) == document["answer"])
    return sum(right) / len(right)


def test_task_scores_with_each_block_removed_equal_those_of_the_logits(
    llama_folder, olmo_folder, token_file, task_folder, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["--data", token_file, "--tasks", "local_words", "--task-path", task_folder]
    assert analyze("layer-drop", "--model", llama_folder, "-o", "drop.json", "--plot", "x.png", *words) == 0
    result = Measurement.read(tmp_path / "drop.json")
    scores, model = result.details["tasks"]["local_words"], huggingface("llama")
    documents = [json.loads(line) for line in (task_folder / "words.jsonl").read_text().splitlines()]
    with torch.no_grad():
        expected = [accuracy(lambda ids: model(ids).logits, documents)]
        for block in model.model.layers:
            with bypassed(block):
                expected.append(accuracy(lambda ids: model(ids).logits, documents))
    assert scores["score"] == pytest.approx(expected) and len(set(expected)) > 1, "a block must matter"
    assert scores["stderr"] == pytest.approx([math.sqrt(score * (1 - score) / 23) for score in expected])
    assert result.blocks["local_words:acc"] == scores["score"][1:]
    assert result.blocks["local_words:drop"] == pytest.approx([expected[0] - score for score in expected[1:]])
    assert "makes one" in fails(capsys, "layer-drop", "--model", olmo_folder, *words)


def fails(capsys, *arguments):
    """Return the one line on stderr of a call that fails."""
    capsys.readouterr()
    assert analyze(*arguments) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("olmo-lns analyze:")]
    assert len(lines) == 1
    return lines[0]


def test_a_model_that_is_refused_gives_a_one_line_error(capsys, tmp_path, llama_folder, olmo_folder, token_file):
    def message(model, *words, what="variance"):
        return fails(capsys, what, "--model", model, "--data", token_file, "--device", "cpu", *words)

    model = huggingface("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    for what in ("variance", "jacobian"):
        assert "of block 2, 3 is NaN or infinite" in message(tmp_path / "nan", what=what)
    for what in ("layer-drop", "gradnorm"):
        assert "The loss is not finite. Check the checkpoint" in message(tmp_path / "nan", what=what)
    assert "the model accepts at most 64 tokens" in message(llama_folder, "--sequence-length", 65)
    assert "says scheme lns, but --scheme says" in message(olmo_folder, "--scheme", "lns:exponent=0.25")
    assert "There is no such folder: no/such/model" in message("./no/such/model")
    (tmp_path / "x.txt").write_text("w4 w5")
    words = "--data", tmp_path / "x.txt", "--tokenizer", "no/such"
    assert "The tokenizer no/such could not be loaded" in message(llama_folder, *words)


def test_what_cannot_be_written_or_read_is_refused_before_the_model_is_loaded(capsys, tmp_path, monkeypatch):
    command = "variance", "--model", "/no/such/model", "--data", "missing.npy"
    assert "Expected a file that ends in .json" in fails(capsys, *command, "-o", "x.csv")
    assert "Expected a file that ends in .png or .svg" in fails(capsys, *command, "--plot", "x.jpg")
    assert "the file missing.npy was not found" in fails(capsys, *command)
    (tmp_path / "missing.npy").write_bytes(b"\1\0" * 64)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2, but" in fails(capsys, *command)


def test_results_that_cannot_be_compared_are_refused_and_different_settings_named(results, tmp_path, caplog, capsys):
    mixed = [results["variance", "olmo"], results["angular", "llama"]]
    assert "A comparison shows one diagnostic" in fails(capsys, "compare", *mixed)
    content = json.loads(results["variance", "llama"].read_text())
    for change in ({"blocks": {"variance": [1, 2], "rms": [1]}}, {"blocks": {}}, {"what": "else"}, {"more": 1}):
        (tmp_path / "part.json").write_text(json.dumps({**content, **change}))
        assert "not a complete result file" in fails(capsys, "compare", "part.json")
    changed = {"tokens": 64, "settings": {**content["settings"], "sequence_length": 8}}
    (tmp_path / "short.json").write_text(json.dumps({**content, **changed}))
    assert analyze("compare", results["variance", "llama"], "short.json") == 0
    assert "differ in tokens: 600, 64" in caplog.text and "differ in sequence_length: 16, 8" in caplog.text
    assert "short.json" in capsys.readouterr().out  # in place of the label, which both have
