"""The options of an export, and what it writes beside the weights: records, configs, tokenizers."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.exports import byte_tokenizer, export, load_hf, refused, save_olmo

from olmo_lns.checkpoints import record_in
from olmo_lns.cli import main
from olmo_lns.record import Record
from olmo_lns.schemes import PRE_LN, Scheme

HF = ("--format", "hf", "--tokenizer", "none")
DOCS = Path(__file__).parents[2] / "docs"


def model_section(folder):
    section = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    return section


@pytest.mark.parametrize(
    ("kind", "init", "sharded"),
    [
        ("lns_default", "normal_depth_scaled", True),
        ("layerscale_rms", "normal_scaled", False),
        ("rms", "normal_scaled", False),
    ],
)
def test_stock_olmo_gets_a_stock_init_fn_and_unfolding_restores_ours(tmp_path, kind, init, sharded):
    trained, stock, again = (tmp_path / name for name in ("trained", "stock-unsharded", "again-unsharded"))
    save_olmo(trained, sharded=sharded, layer_norm_type=kind, init_fn=init)
    if kind == "rms":  # OLMo's unshard.py copies only config.yaml
        (trained / "lns.json").unlink()
    assert export(trained, stock, "--format", "olmo-unsharded") == 0
    assert model_section(stock)["init_fn"] == "normal"
    found = Record.read(stock)
    assert found is not None and not found.active and found.scaled_init == init.removeprefix("normal_")
    assert main(["verify", str(trained), str(stock), "--length", "16"]) == 0  # in a process of stock OLMo
    if kind.startswith("lns"):  # unfolded, it is what it was
        assert export(stock, again, "--unfold") == 0
        assert model_section(again)["init_fn"] == init and Record.read(trained) == Record.read(again)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--exponent", "0.25"), "says exponent 0.5, --exponent says 0.25"),
        (("--tokenizer", "t.json"), "--tokenizer is of --format hf; --format olmo has no place for it"),
        (("--max-shard-size", "1MB"), "--max-shard-size: an unsharded OLMo checkpoint is one model.pt"),
        (("--format", "megatron"), "is an OLMo checkpoint, which is written as olmo or olmo-unsharded or hf"),
        (("--format", "megatron", "--unfold"), "is an OLMo checkpoint, which is unfolded into olmo"),
    ],
)
def test_options_that_do_not_fit_are_refused(checkpoint, folded, tmp_path, capsys, options, reason):
    source = folded if "--unfold" in options else checkpoint
    assert reason in refused(capsys, source, tmp_path / "out", *options)


def test_a_lost_record_is_read_from_the_config(tmp_path, capsys):
    """As in a resume and in analyze: the type holds every parameter, and only a bare type takes another exponent."""
    for kind, words, exponent in (
        ("lns_rms", (), 0.5),
        ("lns_rms", ("--exponent", "0.25"), 0.25),
        ("lns_rms:exponent=0.25", ("--exponent", "0.25"), 0.25),
        ("lns_rms:exponent=0.25", ("--exponent", "0.5"), None),
        ("rms", ("--exponent", "0.25", "--format", "hf"), None),
    ):
        shutil.rmtree(tmp_path / "lost", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        save_olmo(tmp_path / "lost", layer_norm_type=kind)
        (tmp_path / "lost" / "lns.json").unlink(missing_ok=True)
        if exponent is None:
            line = refused(capsys, tmp_path / "lost", tmp_path / "out", *words)
            assert ("no exponent; --exponent 0.25" if kind == "rms" else f"names {kind}, --exponent says 0.5") in line
            continue
        assert export(tmp_path / "lost", tmp_path / "out", *words) == 0
        found = Record.read(tmp_path / "out")
        assert found is not None and found.scheme.parameters == {"exponent": exponent}


def test_folding_changes_one_value_of_config_yaml(checkpoint, folded):
    expected = yaml.safe_load((checkpoint / "config.yaml").read_text())
    expected["model"]["layer_norm_type"] = "rms"
    text = (folded / "config.yaml").read_text()
    assert text.startswith("# LayerNorm Scaling (lns) is folded into the weights; see lns.json.\n")
    assert yaml.safe_load(text) == expected
    assert json.loads((folded / "lns.json").read_text())["folded"] is True


def test_a_pre_ln_model_and_a_fold_are_not_folded(folded, hf, tmp_path, capsys):
    save_olmo(tmp_path / "preln", layer_norm_type="rms")
    assert "is Pre-LN: there is nothing to fold" in refused(capsys, tmp_path / "preln", tmp_path / "out")
    assert export(tmp_path / "preln", tmp_path / "hf", *HF) == 0
    assert "lns" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "folded already" in refused(capsys, folded, tmp_path / "twice")
    assert export(folded, tmp_path / "hf-of-folded", *HF) == 0
    once, direct = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf-of-folded", hf))
    assert all(torch.equal(once[name], direct[name]) for name in direct)


def test_the_record_survives_a_save_by_transformers(hf, tmp_path):
    """Stock code keeps the mark when it loads and saves the model."""
    load_hf(hf).save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["lns"] == "folded"
    assert config["lns_record"]["parameters"] == {"exponent": 0.5} and config["lns_record"]["folded"] is True


# --- the record of a folder, whatever wrote it -----------------------------------------------------


def test_the_record_is_found_in_olmo_checkpoints_and_in_exports(tmp_path):
    quarter = Scheme.of("lns", exponent=0.25)
    save_olmo(tmp_path / "quarter", exponent=0.25, layer_norm_type="lns_rms")
    assert record_in(tmp_path / "quarter") == Record(quarter, "rms", "plain")
    for form in ("olmo", "hf"):
        assert export(tmp_path / "quarter", tmp_path / form, "--format", form, "--tokenizer", "none") == 0
        assert record_in(tmp_path / form) == Record(quarter, "rms", "plain", folded=True)
    save_olmo(tmp_path / "preln", layer_norm_type="rms")
    assert getattr(record_in(tmp_path / "preln"), "scheme", None) == PRE_LN
    (tmp_path / "quarter" / "lns.json").unlink()  # a lost record is in the config
    lost = record_in(tmp_path / "quarter")
    assert lost is not None and str(lost.scheme) == "lns" and lost.norm == "rms"


# --- tokenizers ----------------------------------------------------------------------------------


def test_the_tokenizer_goes_with_the_export(tmp_path, monkeypatch, capsys):
    """The config names the tokenizer; the Python block of docs/export.md then runs on the export."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    changes = {"eos_token_id": 0, "pad_token_id": 0, "max_sequence_length": 64}
    save_olmo(tmp_path / "lns", tokenizer=tokenizer, layer_norm_type="lns_rms", embedding_size=64, **changes)
    model = tmp_path / "model"
    assert export(tmp_path / "lns", model, "--format", "hf", "--dtype", "bf16") == 0
    assert "64 tokens, eos '<eos>'" in capsys.readouterr().out
    assert export(tmp_path / "lns", tmp_path / "again", "--format", "hf", "--tokenizer", model) == 0
    for folder in (model, tmp_path / "again"):
        loaded = AutoTokenizer.from_pretrained(folder)
        ids = loaded("A B").input_ids
        assert ids == [34, 1, 35] and loaded.decode(ids) == "A B"
        assert (loaded.eos_token, loaded.pad_token, loaded.eos_token_id) == ("<eos>", "<eos>", 0)
    generation = GenerationConfig.from_pretrained(model)
    assert (generation.eos_token_id, generation.pad_token_id) == (0, 0)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "export.md").read_text(encoding="utf-8"), re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "docs/export.md", "exec"), {})
    assert capsys.readouterr().out.startswith("THE FACTOR IS")


#: Name -> files of the --tokenizer folder (a number: a tokenizer of that size), message. The model has 128 rows.
TOKENIZERS = {
    "too many tokens": ({"tokenizer.json": 129}, "has 129 tokens, the model only 128"),
    "added beyond": ({"tokenizer.json": 128, "added_tokens.json": '{"<new>": 128}'}, "has 129 tokens, the model only"),
    "a link": ({"tokenizer.json": 64, "vocab.txt": Path("/etc/hostname")}, "vocab.txt is a symbolic link to"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_does_not_fit_is_refused(checkpoint, tmp_path, capsys, name):
    files, reason = TOKENIZERS[name]
    (folder := tmp_path / "tokenizer").mkdir()
    for file, content in files.items():
        if isinstance(content, Path):
            (folder / file).symlink_to(content)
        else:
            byte_tokenizer(folder / file, content) if isinstance(content, int) else (folder / file).write_text(content)
    options = ("--format", "hf", "--tokenizer")
    assert reason in refused(capsys, checkpoint, tmp_path / "out", *options, folder)
    if name == "too many tokens":  # a file is judged as a folder is
        assert reason in refused(capsys, checkpoint, tmp_path / "out", *options, folder / "tokenizer.json")
