"""`olmo-lns analyze` on real checkpoints: result files, tables, figures, and one line for each error."""

import json
import shutil

import numpy as np
import pandas
import pytest
import torch
from pandas.testing import assert_frame_equal
from support.diagnostic_models import huggingface

from olmo_lns import cli
from olmo_lns.diagnostics import MEASURES
from olmo_lns.diagnostics.results import Report
from olmo_lns.errors import LNSError


def analyze(*arguments):
    return cli.main(["analyze", *map(str, arguments)])


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read once, at import
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def results(tmp_path_factory, olmo_folder, llama_folder, token_file):
    """Run every diagnostic on an OLMo checkpoint with LNS and on a Llama: (what, model) -> result file."""
    folder, files = tmp_path_factory.mktemp("results"), {}
    for name, model in (("olmo", olmo_folder), ("llama", llama_folder)):
        for what in MEASURES:
            path = files[what, name] = folder / name / f"{what}.json"
            options = ["--sequence-length", 16, "--batch-size", 4, "--quiet", "--label", name]
            options += ["--sequences", 4] if what == "jacobian" else []
            assert analyze(what, "--model", model, "--data", token_file, "-o", path, *options) == 0
    return files


@pytest.mark.parametrize("what", MEASURES)
def test_results_are_read_back_and_compared_in_tables_and_figures(what, results, tmp_path, capsys):
    files = [results[what, "olmo"], results[what, "llama"]]
    report, other = map(Report.read, files)
    assert (report.what, report.label) == (what, "olmo")
    assert report.settings["sequence_length"] == 16 and report.settings["dtype"] == "float32"
    assert report.settings["lns"]["scheme"] == "lns" and other.settings["lns"] is None
    assert report.result.tokens == {"jacobian": 4, "layer-drop": 562, "gradnorm": 562}.get(what, 600)
    report.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == files[0].read_text(), "reading and writing loses nothing"
    rows = pandas.read_csv(files[0].with_suffix(".csv"))
    assert list(rows) == list(report.result.frame()) and len(rows) == len(report.result.frame()) > 2
    images = [tmp_path / name for name in ("x.png", "x.svg", "again.svg")]
    words = [word for image in images for word in ("-o", image)]
    assert analyze("compare", *files, *words, "--table", tmp_path / "x.csv", "--labels", "A,B") == 0
    assert "| block | A | B |" in capsys.readouterr().out
    assert images[0].read_bytes()[:4] == b"\x89PNG" and images[1].read_bytes() == images[2].read_bytes()
    rows = pandas.read_csv(tmp_path / "x.csv")
    assert set(rows["model"]) == {"A", "B"} and rows.columns[0] == "model"
    assert len(rows) == len(report.result.frame()) + len(other.result.frame())


def test_an_lns_checkpoint_and_its_export_give_the_same_numbers(olmo_folder, token_file, tmp_path, results):
    assert cli.main(["export", str(olmo_folder), str(tmp_path / "hf"), "--format", "hf", "--tokenizer", "none"]) == 0
    options = ["--sequence-length", 16, "--batch-size", 4, "--quiet", "--data", token_file]
    for what in MEASURES:
        out, more = tmp_path / f"{what}.json", ["--sequences", 4] if what == "jacobian" else []
        assert analyze(what, "--model", tmp_path / "hf", *options, "-o", out, *more) == 0
        folded, own = Report.read(out).result, Report.read(results[what, "olmo"]).result
        if what == "gradnorm":  # a folded gain is s times as large, so its own gradient differs
            for one, two in zip(folded.kinds, own.kinds, strict=True):
                assert [one[kind] for kind in ("attention", "mlp")] == pytest.approx(
                    [two[kind] for kind in ("attention", "mlp")], rel=1e-4
                )
        else:
            assert_frame_equal(folded.frame(), own.frame(), rtol=1e-4, atol=1e-6)


def test_compare_warns_of_settings_that_differ(results, llama_folder, token_file, tmp_path, caplog):
    other = tmp_path / "short.json"
    options = ["--tokens", 64, "--sequence-length", 8, "--label", "short", "--quiet"]
    assert analyze("variance", "--model", llama_folder, "--data", token_file, "-o", other, *options) == 0
    assert analyze("compare", results["variance", "llama"], other) == 0
    assert "differ in tokens: 600, 64" in caplog.text and "differ in sequence_length: 16, 8" in caplog.text


def test_figures_show_what_was_measured(results):
    from olmo_lns.diagnostics.plots import draw

    reports = [Report.read(results["angular", name]) for name in ("olmo", "llama")]
    maps = [image for axis in draw(reports).axes for image in axis.images]
    values = [value for report in reports for row in report.result.distance for value in row]
    assert len(maps) == 2 and {image.get_clim() for image in maps} == {(min(values), max(values))}
    for image, report in zip(maps, reports, strict=True):
        rows = report.result.distance
        assert image.get_array()[0, 0] == pytest.approx(rows[0][0])
        assert image.get_array()[1, 0] == pytest.approx(rows[0][1]), "l runs to the right, n upwards"


def test_layer_drop_scores_a_task(llama_folder, token_file, task_folder, tmp_path):
    pytest.importorskip("accelerate")
    out = tmp_path / "drop.json"
    options = ["--tasks", "local_words", "--task-path", task_folder, "--limit", 4, "--quiet", "--plot", "x.png"]
    assert analyze("layer-drop", "--model", llama_folder, "--data", token_file, "-o", out, *options) == 0
    task = Report.read(out).result.tasks["local_words"]
    assert task.metric == "acc" and len(task.without) == 3 and 0 <= task.baseline <= 1
    assert {"local_words:acc", "local_words:stderr", "local_words:drop"} <= set(
        pandas.read_csv(out.with_suffix(".csv"))
    )


def test_plot_draws_the_variance_through_training(tmp_path):
    from olmo_lns.diagnostics.plots import draw_training

    files = [tmp_path / run / "lns_variance.csv" for run in ("preln", "lns")]
    for file, growth in zip(files, (2.0, 1.1), strict=True):
        rows = [f"{step},{block},{growth**block * step},1,1,8\n" for step in (100, 200) for block in (1, 2, 3)]
        file.parent.mkdir()
        file.write_text("step,block,variance,rms,max,tokens\n" + "".join(rows))
    assert analyze("plot", *files, "-o", tmp_path / "t.png", "--log") == 0
    figure = draw_training(files, ["preln", "lns"])
    assert [axis.get_title() for axis in figure.axes[:2]] == ["preln", "lns"]
    assert list(figure.axes[0].lines[2].get_ydata()) == [800.0, 1600.0]


def fails(capsys, *arguments):
    """Return the one line on stderr of a call that fails."""
    capsys.readouterr()
    assert analyze(*arguments) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("olmo-lns analyze:")]
    assert len(lines) == 1
    return lines[0]


def test_a_model_that_is_refused_gives_a_one_line_error(capsys, tmp_path, llama_folder, olmo_folder, token_file):
    def message(model, *words, what="variance"):
        return fails(capsys, what, "--model", model, "--data", token_file, "--quiet", "--device", "cpu", *words)

    (tmp_path / "empty").mkdir()
    shutil.copytree(olmo_folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.pt").unlink()
    huggingface("llama", num_hidden_layers=1).save_pretrained(tmp_path / "one")
    model = huggingface("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    shutil.copytree(olmo_folder, tmp_path / "run" / "step4-unsharded")
    shutil.copy(olmo_folder / "config.yaml", tmp_path / "run")
    for model, said in {
        tmp_path / "empty": "holds neither config.yaml (OLMo)",
        "no/such-model": "transformers cannot load it",
        "/no/such/model": "is no such folder",
        tmp_path / "broken": "neither model.pt nor model_and_optim",
        tmp_path / "one": "no list of two or more modules",
        tmp_path / "run": "one of its checkpoints: step4-unsharded",
    }.items():
        assert said in message(model)
    (tmp_path / "run" / "step4-unsharded" / "config.yaml").write_text("a: [")
    assert "config.yaml: " in message(tmp_path / "run" / "step4-unsharded")
    for what in ("variance", "angular", "jacobian"):
        assert "block 2 is the first whose" in message(tmp_path / "nan", what=what)
    assert "has no list of blocks: none at 'h'" in message(llama_folder, "--blocks", "h")
    assert "the model takes at most 64" in message(llama_folder, "--sequence-length", 65)
    assert "expected auto, cpu, cuda" in message(llama_folder, "--device", "warp drive")
    assert "--device-map is for transformers" in message(olmo_folder, "--device-map", "auto")


def test_data_that_cannot_be_read_give_a_one_line_error(capsys, tmp_path, llama_folder, monkeypatch):
    def message(data, *options, what="variance"):
        return fails(capsys, what, "--model", llama_folder, "--data", data, "--quiet", *options)

    np.save(tmp_path / "ids.npy", np.array([1, 2, 50_279]))
    (tmp_path / "x.txt").write_text("w4 w5")
    np.array([4, 5], np.uint16).tofile(tmp_path / "raw.npy")
    assert "found token id 50279, expected 0..96" in message("ids.npy")
    assert "no tokenizer could be loaded" in message("x.txt", "--tokenizer", "no/such")
    assert "data type 'foo' not understood): see --token-dtype" in message("raw.npy", "--token-dtype", "foo")
    assert "is plain text and has no documents" in message("x.txt", "--no-pack")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process: found WORLD_SIZE=2" in message("x.txt", what="jacobian")
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert "WORLD_SIZE=0: expected a whole number >= 1" in message("x.txt")


def test_an_output_that_cannot_be_written_is_refused_first(capsys, tmp_path, results):
    """The error comes before the search for the model, which does not exist here."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    command = "variance", "--model", "/no/such/model", "--data", "missing.npy"
    for path, words in (("x.csv", "expected .json"), ("folder.json", "it is a folder"), ("file/x.json", "file")):
        assert words in fails(capsys, *command, "-o", path)
    assert "expected .png, .svg" in fails(capsys, *command, "--plot", "x.jpg")
    assert "no such file: missing.npy" in fails(capsys, *command)
    pair = results["variance", "olmo"], results["variance", "llama"]
    assert "expected .csv" in fails(capsys, "compare", *pair, "--table", "x.txt")
    assert "file: File exists" in fails(capsys, "compare", *pair, "-o", "file/x.png")


def test_a_backend_that_cannot_run_is_not_blamed_on_the_checkpoint(capsys, monkeypatch, olmo_folder, token_file):
    monkeypatch.setenv("OLMO_LNS_NORM_BACKEND", "foo")
    message = fails(capsys, "variance", "--model", olmo_folder, "--data", token_file)
    assert "unknown norm backend 'foo'" in message and "checkpoint" not in message


@pytest.mark.parametrize("size", [0, 5000])
def test_weights_that_are_cut_off_are_refused(size, capsys, tmp_path, olmo_folder, llama_folder, token_file):
    for folder, name, said in (
        (olmo_folder, "model.pt", "truncated or not a file of torch.save"),
        (llama_folder, "model.safetensors", "transformers cannot load it"),
    ):
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy)
        (copy / name).write_bytes((copy / name).read_bytes()[:size])
        assert said in fails(capsys, "variance", "--model", copy, "--data", token_file)


def test_a_bad_result_file_gives_a_one_line_error(capsys, tmp_path, results):
    assert "No such file" in fails(capsys, "plot", "missing.json")
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert "not a whole result file" in fails(capsys, "plot", "x.json")
    assert "needs two or more" in fails(capsys, "compare", results["variance", "olmo"])
    mixed = [results["variance", "olmo"], results["angular", "llama"]]
    assert "only results of one diagnostic" in fails(capsys, "compare", *mixed)
    for text, said in (("1,1,x,1,1,1", "parse string"), ("", "has no rows yet"), ("1,1,1,1,1,1\n" * 2, "duplicate")):
        (tmp_path / "rows.csv").write_text("step,block,variance,rms,max,tokens\n" + text)
        assert said in fails(capsys, "plot", "rows.csv")
    assert "found 2 names, expected 1" in fails(capsys, "plot", "rows.csv", "--labels", "a,b")
    same = [results["variance", "olmo"]] * 2
    assert "name them with --labels" in fails(capsys, "compare", *same)
    content = json.loads(results["variance", "olmo"].read_text())
    whole = content["result"]
    for result in ({k: v for k, v in whole.items() if k != "rms"}, {**whole, "rms": [1]}, {**whole, "variance": ["x"] * 4}, [], None):  # fmt: skip
        (tmp_path / "part.json").write_text(json.dumps({**content, "result": result}))
        with pytest.raises(LNSError, match="not a whole result file"):
            Report.read(tmp_path / "part.json")


def test_layer_drop_of_bert_uses_its_mask_token(bert_folder, token_file, tmp_path):
    common = ["--data", token_file, "--sequence-length", 21, "-o", tmp_path / "drop.json"]
    assert analyze("layer-drop", "--model", bert_folder, *common) == 0
    assert Report.read(tmp_path / "drop.json").result.tokens == 28 * 3 + 2
