"""OLMo's own converters must not lose the factor. The tests run these converters themselves."""

import os
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from support.exports import export, save_olmo

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.export import guards

OLMO_SRC = os.environ.get("OLMO_SRC", "")
needs_source = pytest.mark.skipif(
    not Path(OLMO_SRC, "scripts", "convert_olmo_to_hf_new.py").is_file(),
    reason="OLMO_SRC does not point to a checkout of OLMo (its scripts are not in the package)",
)
#: Runs a file as ``python file`` would, with the guards that the plugin installs.
AS_SCRIPT = textwrap.dedent(
    """
    import runpy, sys
    from olmo_lns.export.guards import install
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    """
)
#: transformers 5 no longer has this module; an empty one lets a converter import it.
GONE = "transformers.models.gpt_neox.tokenization_gpt_neox_fast"
NO_FAST_TOKENIZER = f"""
import sys, types
sys.modules[{GONE!r}] = types.ModuleType({GONE!r})
sys.modules[{GONE!r}].GPTNeoXTokenizerFast = None
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guards")
    save_olmo(folder / "lns", layer_norm_type="lns_rms")
    nonparametric = dict(layer_norm_with_affine=False, layer_norm_eps=1e-5)
    save_olmo(folder / "lns_no_gain", layer_norm_type="lns_default", **nonparametric)
    save_olmo(folder / "preln", layer_norm_type="default", **nonparametric)
    for name in ("lns", "lns_no_gain"):
        assert export(folder / name, folder / f"{name}_folded") == 0
    return folder


def run_script(path, *args, allow="", prologue=""):
    command = [sys.executable, "-W", "ignore", "-c", prologue + AS_SCRIPT, str(path), *args]
    environment = {**os.environ, "OLMO_LNS_ALLOW_MISMATCH": allow, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def convert(folder, out, **kwargs):
    script = Path(OLMO_SRC, "scripts", "convert_olmo_to_hf_new.py")
    args = ("--input_dir", str(folder), "--output_dir", str(out), "--no_tokenizer")
    return run_script(script, *args, prologue=NO_FAST_TOKENIZER, **kwargs)


@needs_source
@pytest.mark.parametrize("name", ["lns", "lns_folded"])
def test_the_script_that_drops_the_factor_is_stopped(checkpoints, tmp_path, name):
    """A fold is stopped too: its factor is in gains, which this converter does not write."""
    done = convert(checkpoints / name, tmp_path / "hf")
    assert done.returncode != 0
    assert "was saved with lns:" in done.stderr and "olmo-lns export" in done.stderr
    assert not (tmp_path / "hf").exists()
    assert ("drops the gains" in done.stderr) == (name == "lns_folded")


@needs_source
@pytest.mark.slow
def test_the_script_converts_a_model_that_loses_nothing(checkpoints, tmp_path):
    """It is Pre-LN, or its factor is folded into projections; or the user has allowed the loss."""
    for name, allow in (("preln", ""), ("lns_no_gain_folded", ""), ("lns", "lns-to-preln")):
        done = convert(checkpoints / name, tmp_path / name, allow=allow)
        # The rest of the script may fail under transformers 5; it must have got past the guard.
        assert "was saved with" not in done.stderr, done.stderr
        assert "Fetching all parameters" in done.stdout


@pytest.mark.slow
def test_a_script_is_known_by_its_name(checkpoints, tmp_path):
    """The guard leaves a folder without a config to the converter."""
    for name, folder, code in (
        ("something_else", checkpoints / "lns", 0),
        ("convert_olmo_weights_to_hf", checkpoints / "lns", 1),
        ("convert_olmo_weights_to_hf", tmp_path, 0),
    ):
        script = tmp_path / f"{name}.py"
        script.write_text("from transformers import OlmoConfig\nprint('ran')\n")
        done = run_script(script, "--input_dir", str(folder))
        assert (done.returncode, done.stdout.strip()) == (code, "" if code else "ran"), done.stderr


def test_guards_watch_no_file_and_import_no_framework():
    """A process that saves a stock transformers model is left alone, and no audit hook watches its files."""
    code = """if True:
        import sys
        hooks = set()
        def note(event, arguments):
            if event == "sys.addaudithook":
                hooks.add(sys._getframe(1).f_globals["__name__"].split(".")[0])
        sys.addaudithook(note)
        from olmo_lns.export.guards import install
        install()
        assert not {"torch", "olmo", "transformers"} & set(sys.modules)
        from transformers.models.olmo.configuration_olmo import OlmoConfig
        from transformers import PreTrainedConfig
        assert OlmoConfig.save_pretrained is PreTrainedConfig.save_pretrained
        assert "olmo_lns" not in hooks, hooks
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@needs_source
def test_an_imported_converter_is_guarded(checkpoints, tmp_path, monkeypatch):
    stub = types.ModuleType(GONE)
    stub.GPTNeoXTokenizerFast = None
    monkeypatch.setitem(sys.modules, GONE, stub)
    monkeypatch.syspath_prepend(str(Path(OLMO_SRC, "scripts")))
    guards.install()
    import convert_olmo_to_hf_new

    with pytest.raises(CheckpointMismatchError, match="was saved with lns:"):
        convert_olmo_to_hf_new.write_model(tmp_path / "out", str(checkpoints / "lns"))
    assert not (tmp_path / "out").exists()
    monkeypatch.delitem(sys.modules, "convert_olmo_to_hf_new")


def test_hf_olmo_is_stopped_for_lns_and_converts_other_checkpoints(checkpoints, tmp_path, monkeypatch):
    """The package's own function runs on copies because it writes into the checkpoint."""
    pytest.importorskip("hf_olmo", reason="ai2-olmo without its hf_olmo package")
    guards.install()
    from hf_olmo import OLMoConfig
    from hf_olmo.convert_olmo_to_hf import write_config

    copies = {name: shutil.copytree(checkpoints / name, tmp_path / name) for name in ("lns", "preln", "lns_folded")}
    with pytest.raises(CheckpointMismatchError, match=r"olmo-lns export .* --format hf"):
        write_config(str(copies["lns"]))
    assert not (copies["lns"] / "config.json").exists()
    with pytest.raises(CheckpointMismatchError, match=r"this model has layer_norm_type lns_rms, .*olmo-lns export"):
        OLMoConfig(layer_norm_type="lns_rms").save_pretrained(tmp_path / "elsewhere")
    for name, copy in reversed(copies.items()):
        if name == "lns":
            monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "lns-to-preln")
        write_config(str(copy))
        assert (copy / "config.json").exists()


def test_hf_olmo_builds_no_model_that_it_could_not_save(tmp_path, monkeypatch):
    """Nor does it build a model whose exponent is only in the environment, never in its config."""
    pytest.importorskip("hf_olmo", reason="ai2-olmo without its hf_olmo package")
    guards.install()
    from hf_olmo import OLMoConfig, OLMoForCausalLM

    small = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=97, embedding_size=97, max_sequence_length=16)
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    config = OLMoConfig(layer_norm_type="lns_rms", **small)
    with pytest.raises(
        CheckpointMismatchError, match=r"OLMoForCausalLM: this model has layer_norm_type lns_rms, .*hf init"
    ):
        OLMoForCausalLM(config)
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "lns-to-preln")
    assert OLMoForCausalLM(config).model.transformer.blocks[1].ff_norm.lns_scale == 2**-0.25
    monkeypatch.delenv("OLMO_LNS_ALLOW_MISMATCH")
    OLMoForCausalLM(OLMoConfig(layer_norm_type="rms", **small)).save_pretrained(tmp_path / "stock")
    assert (tmp_path / "stock" / "config.json").is_file()
