"""transformers' folders: ours, and stock ones that were trained with LNS elsewhere, become stock models."""

import json
import os
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import families
from support.exports import export, refused, relative, verify
from support.marks import EXHAUSTIVE
from support.transformers_models import hooked, inputs, stock

from olmo_lns.export.open import open_model
from olmo_lns.integrations.transformers import apply, register

register()
transformers = pytest.importorskip("transformers")


def output(model, kind):
    with torch.no_grad():
        return model(**inputs(kind)).logits.double()


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "fp32"), ("olmo", "fp32"), ("gpt2", "bf16"), ("dinov2", "fp32")])
def test_a_folder_of_ours_becomes_a_stock_model(kind, dtype, tmp_path):
    """Olmo's norms have no gain: the factor goes into the layers that read them. DINOv2 takes images."""
    plain = stock(kind)
    expected = output(hooked(kind, plain, exponent=0.25), kind)
    apply(plain, "lns:exponent=0.25", initialization="upstream", trained=True).save_pretrained(tmp_path / "lns")
    assert export(tmp_path / "lns", tmp_path / "out", "--dtype", dtype) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == kind and not any("lns" in str(item) for item in config.items())
    model = getattr(transformers, type(stock(kind)).__name__).from_pretrained(tmp_path / "out").eval()
    assert relative(output(model, kind), expected) <= (1e-5 if dtype == "fp32" else 0.05)
    assert verify(tmp_path / "lns", tmp_path / "out") == 0


def test_an_export_of_another_exponent_is_found(tmp_path, capsys):
    model = apply(stock("llama"), "lns:exponent=0.25", initialization="upstream", trained=True)
    model.save_pretrained(tmp_path / "lns")
    assert export(tmp_path / "lns", tmp_path / "out") == 0
    shutil.copytree(tmp_path / "lns", tmp_path / "other")
    config = (tmp_path / "lns" / "config.json").read_text()
    assert config.count('lns:exponent=0.25"') == 1
    (tmp_path / "other" / "config.json").write_text(config.replace('lns:exponent=0.25"', 'lns:exponent=0.3"'))
    capsys.readouterr()
    assert verify(tmp_path / "other", tmp_path / "out") == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gpt_oss", "fp16"), pytest.param("ernie4_5_moe", "bf16", marks=EXHAUSTIVE)]
)
def test_a_family_that_transformers_loads_in_two_dtypes_is_verified(kind, dtype, tmp_path, capsys):
    """transformers keeps the norms of gpt-oss, and the routers of ERNIE 4.5 MoE, in fp32."""
    apply(families.tiny(kind)[0], initialization="upstream", trained=True).save_pretrained(tmp_path / "lns")
    assert export(tmp_path / "lns", tmp_path / "out", "--dtype", dtype) == 0
    loaded = open_model(tmp_path / "out")
    assert len({parameter.dtype for parameter in loaded.parameters()}) == 2
    assert verify(tmp_path / "lns", tmp_path / "out") == 0
    path = tmp_path / "out" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.input_layernorm.weight"] *= 1.1
    save_file(weights, path, {"format": "pt"})
    capsys.readouterr()
    assert verify(tmp_path / "lns", tmp_path / "out") == 1
    assert "weights: model.layers.1.input_layernorm.weight" in capsys.readouterr().out


def test_a_stock_llama_that_was_trained_with_lns_elsewhere(tmp_path, capsys):
    """The form of pengxiang/LNS_1B: config.json of a Llama, one pytorch_model.bin, RoPE's frequencies in it."""
    model, folder = stock("llama"), tmp_path / "LNS_1B"
    model.config.save_pretrained(folder)
    state = model.state_dict() | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    torch.save(state, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    expected = output(hooked("llama", model), "llama")
    assert "--scheme lns" in refused(capsys, folder, tmp_path / "out")
    assert export(folder, tmp_path / "out", "--scheme", "lns") == 0
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert relative(output(model, "llama"), expected) <= 1e-5
    assert relative(output(open_model(folder, scheme="lns"), "llama"), expected) <= 1e-5
    assert verify(folder, tmp_path / "out", "--scheme", "lns") == 0
    assert verify(folder, tmp_path / "out") == 1  # Pre-LN is another model


def test_what_cannot_be_exported_is_refused(tmp_path, capsys):
    apply(stock("gpt2"), initialization="upstream", trained=True).save_pretrained(tmp_path / "lns")
    path, lost = tmp_path / "lns" / "model.safetensors", "transformer.h.0.ln_1.bias"
    weights = load_file(path)
    kept = weights.pop(lost)
    save_file(weights, path, {"format": "pt"})
    assert f"{lost} is missing" in refused(capsys, tmp_path / "lns", tmp_path / "out")
    save_file(weights | {lost: kept[:3].clone()}, path, {"format": "pt"})
    refused(capsys, tmp_path / "lns", tmp_path / "out")
    save_file(weights | {lost: torch.full_like(kept, 1e30)}, path, {"format": "pt"})
    assert "infinite" in refused(capsys, tmp_path / "lns", tmp_path / "out", "--dtype", "fp16")
    path.write_bytes(path.read_bytes()[:1000])
    assert "cannot be loaded" in refused(capsys, tmp_path / "lns", tmp_path / "out")
    path.unlink()
    names = dict.fromkeys(weights, "model-00001-of-00002.safetensors")
    (tmp_path / "lns" / f"{path.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert "model-00001-of-00002" in refused(capsys, tmp_path / "lns", tmp_path / "out")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "Merge it first" in refused(capsys, tmp_path / "adapter", tmp_path / "out")
    assert "is exported as hf" in refused(capsys, tmp_path / "lns", tmp_path / "out", "--format", "olmo")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        *(
            (path, "no such folder")
            for path in ("runs/stp1000", "stp1000", "runs/lns/stp1000", "./owner/name", "~/run")
        ),
        *((path, "no such folder") for path in ("owner/name/", "owner/name@main", "https://huggingface.co/owner/name")),
        ("runs/note", "runs/note is a file"),
        ("runs/note/step1000", "no such folder"),
        ("latest", "latest is a link to gone, which does not exist"),
        ("latest/step1000", "no such folder"),
        ("itself/step1000", "no such folder"),
        ("runs/" + "x" * 300, "File name too long"),
    ],
)
def test_a_mistyped_path_is_named_without_asking_the_hub(path, found, tmp_path, monkeypatch, capsys):
    """A name on the hub has two parts, and there is no folder, file or link with the name of the first one."""
    (tmp_path / "runs" / "step1000").mkdir(parents=True)
    (tmp_path / "runs" / "note").write_text("a file")
    (tmp_path / "latest").symlink_to("gone")
    (tmp_path / "itself").symlink_to("itself")
    monkeypatch.chdir(tmp_path)
    for function in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, function, lambda *args, **kwargs: pytest.fail("the hub was asked"))
    assert found in refused(capsys, path, tmp_path / "out")


@pytest.mark.parametrize(
    ("out", "found"),
    [
        ("latest", "exists"),
        ("itself", "exists"),
        ("note", "exists"),
        ("note/out", "note is no folder"),
        ("latest/out", "latest is no folder"),
        ("~/out", "starts with ~"),
    ],
)
def test_an_export_to_a_place_that_cannot_be_created_is_refused_at_once(out, found, tmp_path, monkeypatch, capsys):
    (tmp_path / "note").write_text("a file")
    (tmp_path / "latest").symlink_to("gone")
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "lns").mkdir()
    (tmp_path / "lns" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert export("lns", out) == 1
    assert found in capsys.readouterr().err and sorted(os.listdir()) == ["itself", "latest", "lns", "note"]


def test_folders_and_files_may_be_links(tmp_path, capsys):
    plain = stock("llama")
    expected = output(hooked("llama", plain), "llama")
    apply(plain, initialization="upstream", trained=True).save_pretrained(tmp_path / "lns")
    (tmp_path / "latest").symlink_to("lns")
    (tmp_path / "again").symlink_to(tmp_path / "latest")
    assert export(tmp_path / "again", tmp_path / "out") == 0
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert relative(output(loaded, "llama"), expected) <= 1e-5
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "lns" / name).rename(kept := tmp_path / name)
        (tmp_path / "lns" / name).symlink_to("/nowhere/blob")
        assert (
            "safetensors" in (line := refused(capsys, tmp_path / "latest", tmp_path / "new")) or "config.json" in line
        )
        (tmp_path / "lns" / name).unlink()
        kept.rename(tmp_path / "lns" / name)


def test_a_name_that_is_no_path_is_looked_up_on_the_hub(tmp_path, monkeypatch, capsys):
    """Offline, from the cache of the hub: a folder of symbolic links."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    plain = stock("llama")
    expected = output(hooked("llama", plain), "llama")
    apply(plain, initialization="upstream", trained=True).save_pretrained(tmp_path / "blobs")
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert export("owner/name", tmp_path / "out", "--tokenizer", "none") == 0
    assert "There is no folder owner/name here" in capsys.readouterr().err
    assert (
        relative(output(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval(), "llama"), expected)
        <= 1e-5
    )
