"""``verify`` compares with what the exporter knew, so that it fails where checkpoint and export are misread alike."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.diagnostic_models import LLAMA_LIKE
from support.exports import export, refused, relative, verify
from support.transformers_models import inputs, stock

from olmo_lns import sites
from olmo_lns.export.checkpoint import OpenCheckpoint
from olmo_lns.export.receipt import RECEIPT_FILE, measure_trained
from olmo_lns.integrations.transformers import apply, register

register()
transformers = pytest.importorskip("transformers")

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 16, "rope_theta": 5e5}


def write_config(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def forget_the_base(values):
    """The view that transformers 4 has of a config that transformers 5 wrote, and 5 of one without the setting."""
    for name in ("rope_theta", "rope_parameters", "rope_scaling"):
        values.pop(name, None)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A checkpoint with a rotary base of 5e5 and llama3 scaling, and its export in fp32."""
    place = tmp_path_factory.mktemp("receipt")
    scaling = {name: value for name, value in ROPE.items() if name != "rope_theta"}
    model = stock("llama", rope_theta=5e5, rope_scaling=scaling)
    apply(model, initialization="upstream", trained=True).save_pretrained(place / "lns")
    assert export(place / "lns", place / "out") == 0
    return place


def copied(exports, tmp_path):
    shutil.copytree(exports / "lns", tmp_path / "lns")
    shutil.copytree(exports / "out", tmp_path / "out")
    return tmp_path


def test_an_export_alone_is_verified(exports, capsys):
    assert verify(exports / "out") == 0
    assert "from the exporter's" in capsys.readouterr().out


def test_a_base_that_both_sides_lost_is_found(exports, tmp_path, capsys):
    folder = copied(exports, tmp_path)
    for name in ("lns", "out"):
        write_config(folder / name, forget_the_base)
    assert verify(folder / "lns", folder / "out") == 1
    printed = capsys.readouterr().out
    assert "rotary embedding: transformers" in printed and "checkpoint: as it is loaded here" in printed
    (folder / "out" / RECEIPT_FILE).unlink()
    assert verify(folder / "lns", folder / "out") == 0, "without the receipt, two equal mistakes cannot be told"


@pytest.mark.parametrize("change", ["rounded", "weight", "head"])
def test_a_changed_export_is_found_without_the_checkpoint(change, exports, tmp_path, capsys):
    folder = copied(exports, tmp_path) / "out"
    weights = load_file(folder / "model.safetensors")
    if change == "rounded":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    elif change == "weight":
        weights["model.layers.2.mlp.down_proj.weight"] *= 1.001
    else:
        del weights["lm_head.weight"]
        write_config(folder, lambda values: values.update(tie_word_embeddings=True))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert verify(folder) == 1
    expected = {"rounded": "dtypes: found ['bfloat16']", "weight": "logits", "head": "tied: found True"}[change]
    assert expected in capsys.readouterr().out


def test_frequencies_that_one_side_lacks_are_a_difference(exports, tmp_path, capsys):
    path = copied(exports, tmp_path) / "out" / RECEIPT_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rotary": []}))
    assert verify(tmp_path / "out") == 1
    assert "than the exporter (none)" in capsys.readouterr().out


def test_a_narrow_export_is_judged_by_the_rounding_of_the_unfolded_model(exports, tmp_path, capsys):
    assert export(exports / "lns", tmp_path / "out", "--dtype", "bf16") == 0 and verify(tmp_path / "out") == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights["model.norm.weight"] *= 1.05
    save_file(weights, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert verify(tmp_path / "out") == 1
    assert "logits: they differ by" in capsys.readouterr().out


def test_a_receipt_that_is_missing_or_damaged_is_named(exports, tmp_path, capsys):
    folder = copied(exports, tmp_path) / "out"
    (folder / RECEIPT_FILE).write_text((folder / RECEIPT_FILE).read_text()[:100])
    assert verify(folder) == 1 and f"{RECEIPT_FILE} is damaged" in capsys.readouterr().err
    (folder / RECEIPT_FILE).unlink()
    assert verify(folder) == 1 and f"has no {RECEIPT_FILE}" in capsys.readouterr().err


def test_every_spelling_is_written(exports):
    values = json.loads((exports / "out" / "config.json").read_text())
    assert values["rope_theta"] == 5e5 and values["dtype"] == values["torch_dtype"] == "float32"
    assert values["rope_scaling"] == {name: value for name, value in ROPE.items() if name != "rope_theta"}


@pytest.mark.parametrize("lost", [("rope_parameters",), ("rope_theta", "rope_scaling")])
def test_either_spelling_is_enough(lost, exports, tmp_path):
    """The keys that one generation of transformers writes; each is read alone by the installed one."""
    folder = copied(exports, tmp_path)
    expected = transformers.LlamaForCausalLM.from_pretrained(folder / "out").eval()
    write_config(folder / "lns", lambda values: [values.update(rope_parameters=ROPE), [values.pop(x, 0) for x in lost]])
    if lost == ("rope_parameters",):
        old = {name: value for name, value in ROPE.items() if name != "rope_theta"}
        write_config(folder / "lns", lambda values: values.update(rope_theta=5e5, rope_scaling=old))
    assert export(folder / "lns", tmp_path / "again") == 0 and verify(tmp_path / "again") == 0
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert relative(found(**inputs("llama")).logits, expected(**inputs("llama")).logits) == 0


#: Family -> what gives its model a base of 5e5 and rotates half of each head.
OTHER_NAMES = {
    "gpt_neox": dict(rotary_emb_base=5e5, rotary_pct=0.5),
    "stablelm": dict(rope_theta=5e5, partial_rotary_factor=0.5),
    "nemotron": dict(rope_theta=5e5, partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_either_spelling_of_another_family_is_enough(family, tmp_path):
    settings = OTHER_NAMES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[family](**{**LLAMA_LIKE, **settings})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    model = apply(model.eval(), initialization="upstream", trained=True)
    model.save_pretrained(tmp_path / "lns")
    assert export(tmp_path / "lns", tmp_path / "out") == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings.items() <= written.items()
    spellings = [("rope_parameters",)]
    if transformers.__version__ >= "5":  # version 4 does not read rope_parameters
        spellings.append(("rope_theta", "rope_scaling", *settings))
    with torch.no_grad():
        expected = model(**inputs("llama")).logits
        for lost in spellings:
            kept = {name: value for name, value in written.items() if name not in lost}
            (tmp_path / "out" / "config.json").write_text(json.dumps(kept))
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
            assert relative(loaded(**inputs("llama")).logits, expected) <= 1e-5, lost


def test_stock_loaders_see_no_other_file(exports):
    names = {path.name for path in (exports / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", RECEIPT_FILE}


def test_a_version_that_computes_another_function_is_named(tmp_path, capsys):
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    model = stock("llama", rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=32)
    apply(model, initialization="upstream", trained=True).save_pretrained(tmp_path / "lns")
    assert export(tmp_path / "lns", tmp_path / "out") == 0
    assert "warning: transformers 4.48 computes YaRN from max_position_embeddings" in capsys.readouterr().out
    assert "exists" in refused(capsys, tmp_path / "lns", tmp_path / "out")


def test_only_a_missing_kernel_leaves_a_receipt_without_logits():
    """A model that runs nowhere must not be exported as one that only does not run here."""
    llama = apply(stock("llama"), trained=True)
    opened = OpenCheckpoint(llama, "hf", sites.read_back(llama), Path("folder"), max_length=8)
    assert "logits" in measure_trained(opened)
    assert "not implemented for 'Float8" in measure_trained(opened, torch.float8_e4m3fn)["not_run"]
    llama.lm_head = torch.nn.Linear(1, 96)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measure_trained(opened)
