"""``olmo-lns verify`` prints what it compared, and fails when it should."""

import json
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.exports import export, save_olmo

from olmo_lns.checkpoints import record_in
from olmo_lns.cli import main
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.cli import source_of
from olmo_lns.export.comparison import StockOLMo, differences


@pytest.fixture(scope="module")
def bf16(checkpoint):
    assert export(checkpoint, checkpoint.with_name("bf16"), "--format", "hf", "--dtype", "bf16") == 0
    return checkpoint.with_name("bf16")


@pytest.fixture
def exports(checkpoint, folded, hf, bf16):
    return {"olmo": folded, "hf": hf, "bf16": bf16}


def verify(*args):
    return main(["verify", *map(str, args), "--length", "16"])


@pytest.mark.parametrize("form", ["olmo", "hf", "bf16"])
def test_the_report_compares_files_logits_and_perplexity(checkpoint, exports, tmp_path, capsys, form):
    """verify compares on random tokens, and on a text where the export has a tokenizer."""
    (tmp_path / "text").write_text("THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 3)
    for words in ([], ["--text", tmp_path / "text"]) if form == "hf" else ([],):
        assert verify(checkpoint, exports[form], *words) == 0
        out = capsys.readouterr().out
        assert "files match" in out and out.rstrip().endswith("PASS")
        assert re.search(r"positions compared +128\n", out)
        found, allowed = map(float, re.search(r"logit (\S+) \(allowed (\S+)\)", out).groups())
        assert 0 < found <= allowed < (1.0 if form == "bf16" else 1e-3)
        line = re.search(r"perplexity +(\S+) checkpoint, (\S+) export, of (.*)\n", out)
        assert line is not None and line[3] == (str(words[1]) if words else "random tokens (seed 0)")
        assert float(line[2]) == pytest.approx(float(line[1]), rel=1e-5 if form != "bf16" else 1e-2)


def in_weights(form, change):
    def tamper(folder):
        path = folder / ("model.pt" if form == "olmo" else "model.safetensors")
        state = torch.load(path) if form == "olmo" else load_file(path)
        change(state)
        torch.save(state, path) if form == "olmo" else save_file(state, path, metadata={"format": "pt"})

    return tamper


def in_config(name="config.json", **changes):
    def tamper(folder):
        text, stock = (folder / name).read_text(), name == "config.json"
        values = json.loads(text) if stock else yaml.safe_load(text)  # YAML 1.1 reads 1e-06 as text
        (values if stock else values["model"]).update(changes)
        (folder / name).write_text(json.dumps(values))

    return tamper


def without_the_factor(state):
    for index in range(4):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{index}.{norm}.weight"] *= (index + 1) ** 0.5


GAIN, MATRIX = "model.layers.2.input_layernorm.weight", "model.layers.1.mlp.down_proj.weight"
OLMOS = "transformer.blocks.1.ff_out.weight"
TAMPERED = {
    "a weight": ("hf", in_weights("hf", lambda s: s[MATRIX][0, 0].mul_(1.001)), f"{MATRIX}: 1 of"),
    "a NaN": ("hf", in_weights("hf", lambda s: s[MATRIX][0, 0].fill_(torch.nan)), f"{MATRIX}: 1 of"),
    "a shape": ("hf", in_weights("hf", lambda s: s.update({GAIN: s[GAIN][:-1].clone()})), f"{GAIN}: shape (31,), exp"),
    "one less": ("hf", in_weights("hf", lambda s: s.pop(GAIN)), f"the export lacks the weight {GAIN}"),
    "one more": ("hf", in_weights("hf", lambda s: s.update(b=torch.ones(2))), "the export has the weight b"),
    "bf16 gains": ("bf16", in_weights("bf16", lambda s: s[GAIN].mul_(1.01)), f"{GAIN}: "),
    "eps": ("hf", in_config(rms_norm_eps=1e-5), "config: rms_norm_eps is 1e-05, expected 1e-06"),
    "ties": ("hf", in_config(tie_word_embeddings=True), "config: tie_word_embeddings is True, expected False"),
    "rope": ("hf", in_config(rope_theta=500.0), "rope_theta is 500.0, expected 10000.0"),
    "dtype": ("hf", in_config(torch_dtype="bfloat16"), "config: dtype is bfloat16, the weights are float32"),
    "window": ("hf", in_config(max_position_embeddings=32), "max_position_embeddings is 32, expected 16"),
    "sliding": ("hf", in_config(sliding_window=4), "config: sliding_window is 4, expected 'nothing'"),
    "olmo weight": ("olmo", in_weights("olmo", lambda s: s[OLMOS][0, 0].mul_(1.001)), f"{OLMOS}: 1 of"),
    "olmo eps": ("olmo", in_config("config.yaml", layer_norm_eps=2e-6), "config: layer_norm_eps is 2e-06"),
    "olmo rope": ("olmo", in_config("config.yaml", rope_theta=500), "config: rope_theta is 500"),
    "olmo window": ("olmo", in_config("config.yaml", max_sequence_length=32), "config: max_sequence_length is 32"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_changed_export_without_its_checksums_fails(checkpoint, exports, tmp_path, name):
    """The logits of most of these would pass."""
    form, tamper, expected = TAMPERED[name]
    copy = shutil.copytree(exports[form], tmp_path / form)
    assert differences(source_of(checkpoint), checkpoint, copy, record_in(copy)) == (27 if form == "olmo" else 39, [])
    tamper(copy)
    _, found = differences(source_of(checkpoint), checkpoint, copy, record_in(copy))
    assert any(expected in line for line in found) and len(found) == 1, found


@pytest.mark.parametrize(
    ("form", "tamper", "found"),
    [
        ("bf16", TAMPERED["bf16 gains"][1], f"differs                 {GAIN}: "),  # which logits do not show
        ("hf", in_weights("hf", without_the_factor), "none in this folder"),
        ("hf", TAMPERED["a NaN"][1], "export: NaN or infinite from model.layers.1.mlp.down_proj on\nFAIL"),
    ],
)
def test_a_change_fails_with_and_without_checksums(checkpoint, exports, tmp_path, capsys, form, tamper, found):
    copy = shutil.copytree(exports[form], tmp_path / form)
    tamper(copy)
    assert verify(checkpoint, copy) == 1
    assert "model.safetensors differs from its checksum" in capsys.readouterr().err
    (copy / "SHA256SUMS").unlink()
    assert verify(checkpoint, copy) == 1
    out = capsys.readouterr().out
    assert found in out and out.rstrip().endswith("FAIL")
    if form == "bf16":
        off, allowed = map(float, re.search(r"logit (\S+) \(allowed (\S+)\)", out).groups())
        assert off <= allowed


def test_weight_names_that_stock_olmo_does_not_read_fail(checkpoint, folded, tmp_path, capsys):
    copy = shutil.copytree(folded, tmp_path / "copy")
    (copy / "SHA256SUMS").unlink()
    in_weights("olmo", lambda s: [s.update({f"model.{name}": s.pop(name)}) for name in list(s)])(copy)
    assert verify(checkpoint, copy) == 1
    assert "stock OLMo cannot run it: RuntimeError" in capsys.readouterr().err


def test_a_tied_head_that_is_written_twice_must_equal_the_embedding(tmp_path):
    lns, out = tmp_path / "lns", tmp_path / "hf"
    save_olmo(lns, layer_norm_type="lns_rms", weight_tying=True)
    assert export(lns, out, "--format", "hf", "--tokenizer", "none") == 0
    weights = load_file(out / "model.safetensors")
    for factor, problems in ((1.0, 0), (1.5, 1)):
        head = weights["model.embed_tokens.weight"] * factor
        save_file({**weights, "lm_head.weight": head}, out / "model.safetensors", metadata={"format": "pt"})
        assert len(differences(source_of(lns), lns, out, record_in(out))[1]) == problems


def test_config_yaml_keeps_its_text(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    added = "# ours\nwandb_name: '4e12'  # quoted: a float without\n"
    (copy / "config.yaml").write_text(added + (copy / "config.yaml").read_text())
    assert export(copy, tmp_path / "out", "--format", "olmo") == 0
    assert added in (tmp_path / "out" / "config.yaml").read_text()


def test_an_export_that_overflows_fp16_fails(tmp_path, capsys):
    """The feed-forward layer of block 3 overflows fp16 and not fp32."""
    state = save_olmo(tmp_path / "lns", layer_norm_type="lns_rms").state_dict()
    state["transformer.blocks.2.ff_proj.weight"] *= 3000.0
    torch.save(state, tmp_path / "lns" / "model.pt")
    for name, options in (("fp16", ("--dtype", "fp16")), ("fp32", ())):
        out = tmp_path / name
        assert export(tmp_path / "lns", out, "--format", "hf", "--tokenizer", "none", *options) == 0
        capsys.readouterr()
        assert verify(tmp_path / "lns", out) == (1 if name == "fp16" else 0)
        text = capsys.readouterr().out
        assert text.rstrip().endswith("FAIL" if name == "fp16" else "PASS")
        assert ("export: NaN or infinite from model.layers.2.mlp" in text) == (name == "fp16"), text


@pytest.mark.slow
def test_stock_olmo_runs_without_the_plugin(checkpoint):
    """The process that runs an OLMo export does not know the lns types."""
    with pytest.raises(LNSConfigError, match="stock OLMo cannot run it: .*lns_rms"):
        StockOLMo(checkpoint, torch.float32).run(torch.arange(8)[None])


def changed(**values):
    def change(folder):
        (folder / "SHA256SUMS").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


@pytest.mark.parametrize(
    ("of", "change", "reason"),
    [
        ("checkpoint", None, "is an LNS checkpoint (lns"),
        ("hf", changed(lns="lns_rms"), "config.json says lns: 'lns_rms'"),
        ("hf", changed(model_type="olmo_lns_unknown"), "stock transformers cannot load it"),
    ],
)
def test_a_folder_that_is_not_an_export_is_refused(checkpoint, hf, tmp_path, capsys, of, change, reason):
    shutil.copytree({"checkpoint": checkpoint, "hf": hf}[of], tmp_path / "copy")
    if change:
        change(tmp_path / "copy")
    assert verify(checkpoint, tmp_path / "copy") == 1
    assert reason in capsys.readouterr().err


def test_an_export_of_another_model_is_refused(checkpoint, tmp_path, capsys):
    save_olmo(tmp_path / "other", layer_norm_type="lns_rms", vocab_size=4096, embedding_size=4096)
    assert export(tmp_path / "other", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    capsys.readouterr()
    assert verify(checkpoint, tmp_path / "hf") == 1
    captured = capsys.readouterr()
    assert "of another model" in captured.err and "PASS" not in captured.out


def test_a_folder_that_is_not_a_checkpoint_is_refused(checkpoint, hf, tmp_path, capsys):
    for command, reason in (
        (("verify", checkpoint, checkpoint), "is the checkpoint itself"),
        (("verify", tmp_path, hf), "not a checkpoint (the paper's LLaMA: say --source authors)"),
        (("export", hf, tmp_path / "out"), "is a Hugging Face export (folded lns"),
        (("export", hf, tmp_path / "out", "--unfold"), "is a Hugging Face export (folded lns"),
    ):
        assert main(list(map(str, command))) == 1
        assert reason in capsys.readouterr().err
