"""The promises of SECURITY.md for commands that read a checkpoint: a hostile folder runs no code.

A hostile file makes a folder when it is unpickled, imported or called. Distributed checkpoints are in test_metadata.py,
test_olmo_core.py and test_megatron.py.
"""

import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from support.exports import export, refused
from support.transformers_models import stock, tokenizer

from olmo_lns.cli import main
from olmo_lns.integrations.transformers import apply, register

register()
transformers = pytest.importorskip("transformers")
CODE = "import os\nos.mkdir({ran!r})\nfrom transformers import LlamaConfig as Own, LlamaForCausalLM as OwnModel\n"


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def folder(tmp_path):
    """A transformers folder under LNS."""
    model = apply(stock("llama"), initialization="upstream", trained=True)
    model.save_pretrained(tmp_path / "lns")
    return tmp_path / "lns"


@pytest.fixture
def ran(tmp_path):
    """The folder that hostile code makes, which must not exist at the end."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists(), "code of the checkpoint ran"


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def analyze(folder, tmp_path):
    torch.arange(2, 40).numpy().astype("uint16").tofile(tmp_path / "ids.npy")
    words = ["--model", folder, "--data", tmp_path / "ids.npy", "--sequence-length", 16, "--device", "cpu"]
    return main(["analyze", "variance", *map(str, words), "-o", str(tmp_path / "out.json")])


@pytest.mark.parametrize("layout", ["one file", "shards", "the format of torch 1.5"])
def test_pickled_weights_of_transformers(layout, folder, ran, tmp_path, capsys):
    (folder / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if layout == "shards" else "pytorch_model.bin"
    legacy = layout != "the format of torch 1.5"
    torch.save({"model.norm.weight": Hostile(ran)}, folder / name, _use_new_zipfile_serialization=legacy)
    if layout == "shards":
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refused(capsys, folder, tmp_path / "out")
    assert main(["verify", str(folder), str(folder)]) == 1 and analyze(folder, tmp_path) == 1


@pytest.mark.parametrize("known", [True, False])
def test_python_files_of_a_model(known, folder, ran, tmp_path, monkeypatch, capsys):
    """A terminal would be asked whether to run them. Here it answers yes."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    change_config(folder, auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"})
    if known:  # the package has the model type as well
        assert export(folder, tmp_path / "out") == 0
    else:
        change_config(folder, model_type="own")
        refused(capsys, folder, tmp_path / "out")
        assert analyze(folder, tmp_path) == 1


def test_python_files_of_a_tokenizer(folder, ran, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    values = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    assert "--tokenizer none" in refused(capsys, folder, tmp_path / "out")


def test_a_kernel_that_a_config_names(folder, ran, tmp_path, monkeypatch):
    """transformers 5 downloads a kernel for attention and imports it, if the package kernels is installed."""
    kernels = types.ModuleType("kernels")
    kernels.get_kernel = lambda *_, **__: os.mkdir(ran)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    monkeypatch.setattr(hub, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(hub, "get_kernel_hub", kernels.get_kernel, raising=False)
    change_config(folder, attn_implementation="owner/kernel", _attn_implementation="owner/kernel")
    assert export(folder, tmp_path / "out") == 0
    assert "owner/kernel" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("text", ["!!python/object/apply:os.mkdir [{ran!r}]", "!!python/name:os.system"])
def test_yaml_of_olmo(text, ran, tmp_path, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from support.exports import save_olmo

    save_olmo(tmp_path / "step1", layer_norm_type="lns_rms")
    path = tmp_path / "step1" / "config.yaml"
    path.write_text(f"{path.read_text()}\nhostile: {text.format(ran=str(ran))}\n")
    assert "config.yaml cannot be loaded" in refused(capsys, tmp_path / "step1", tmp_path / "out")


def test_pickled_weights_of_olmo(ran, tmp_path, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from support.exports import save_olmo

    save_olmo(tmp_path / "step1", layer_norm_type="lns_rms")
    torch.save({"a": Hostile(ran)}, tmp_path / "step1" / "model.pt")
    refused(capsys, tmp_path / "step1", tmp_path / "out")


def test_a_file_that_a_link_leads_to_is_exported_only_if_it_has_the_form(folder, tmp_path, capsys):
    """A chat template may have any text; weights, config and tokenizer may not."""
    (secret := tmp_path / "secret").write_text("my secret")
    (folder / "chat_template.jinja").symlink_to(secret)
    (folder / "notes.txt").symlink_to(secret)
    assert export(folder, tmp_path / "out", "--tokenizer", "none") == 0
    assert not [path for path in (tmp_path / "out").rglob("*") if b"my secret" in path.read_bytes()]
    tokenizer().save_pretrained(folder)
    assert export(folder, tmp_path / "with tokenizer") == 0
    assert (tmp_path / "with tokenizer" / "chat_template.jinja").read_text() == "my secret"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(secret)
        assert "my secret" not in refused(capsys, folder, tmp_path / "new")
        (folder / name).unlink()
        (tmp_path / name).rename(folder / name)


def test_the_start_up_hook_is_one_line_and_can_be_disabled():
    import olmo_lns

    text = (Path(olmo_lns.__file__).parent / "integrations" / "olmo_lns_autoload.pth").read_text()
    assert len(text.splitlines()) == 1 and "OLMO_LNS_DISABLE" in text
