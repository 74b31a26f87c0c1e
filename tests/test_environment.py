"""Wrong settings and numbers are reported before anything runs; all environment variables are in one list."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from support import forked, launch

import olmo_lns
from olmo_lns import cli, environment
from olmo_lns.errors import LNSConfigError

#: A wrong name -> the name that the error must suggest.
WRONG = {
    "OLMO_LNS_SCALED_INIT": "OLMO_LNS_INITIALIZATION=...",
    "OLMO_LNS_SCHEME": "layer_norm_type=lns:exponent=...",
    "OLMO_LNS_MONITR": "OLMO_LNS_MONITOR",
    "OLMO_LNS_QQQQ": "",
}


def test_an_unknown_variable_is_refused_and_the_nearest_name_suggested(monkeypatch):
    for name in environment.VARIABLES:
        monkeypatch.setenv(name, "1")
    environment.check()
    for name, nearest in WRONG.items():
        with monkeypatch.context() as context:
            context.setenv(name, "0.3")
            hint = re.escape(f"{name} is unknown" + (f" (did you mean '{nearest}'?)" if nearest else ". The variables"))
            with pytest.raises(LNSConfigError, match=hint) as caught:
                environment.check()
            assert all(known in str(caught.value) for known in environment.VARIABLES)


def test_a_switch_is_on_or_off(monkeypatch):
    for value in ("true", "yes", "01"):
        monkeypatch.setenv("OLMO_LNS_DISABLE", value)
        with pytest.raises(LNSConfigError, match=f"OLMO_LNS_DISABLE is '{value}'. The values are 1"):
            environment.check()
    for value, on in (("1", True), (" 1 ", True), ("0", False), ("", False)):
        monkeypatch.setenv("OLMO_LNS_DISABLE", value)
        environment.check()
        assert environment.is_set("OLMO_LNS_DISABLE") is on


def test_the_list_holds_every_variable_of_the_package_and_the_usage_shows_it(capsys):
    package = Path(olmo_lns.__file__).parent
    text = " ".join(path.read_text() for path in package.rglob("*.py"))
    assert set(re.findall(r"OLMO_LNS_[A-Z_]*[A-Z]", text)) == set(environment.VARIABLES)
    cli.main(["--help"])
    usage = capsys.readouterr().out
    assert all(name in usage and text in usage for name, text in environment.VARIABLES.items())


@pytest.mark.parametrize("entry", [["train", "config.yaml"], [__file__]], ids=["olmo-lns train", "launcher"])
def test_an_unknown_variable_stops_training_and_the_launcher(tmp_path, entry):
    """Each entry point runs in its own interpreter, as a user runs it."""
    env = launch.environment(OLMO_LNS_EXPONANT="0.3")
    done = launch.run([sys.executable, "-m", "olmo_lns", *entry], cwd=tmp_path, env=env)
    assert done.code and "OLMO_LNS_EXPONANT is unknown (did you mean 'layer_norm_type=lns:" in done.text
    assert done.text.count("\n") == 1, "one line, no traceback"


BUILDS = """
import transformers.models.auto.configuration_auto
from olmo.config import ModelConfig
from olmo.model import OLMo
kind = {"d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 8, "embedding_size": 8, "rope": True, "init_device": "cpu"}
OLMo(ModelConfig.new(**kind, layer_norm_type="rms"))
print("stock")
OLMo(ModelConfig.new(**kind, layer_norm_type="lns_rms"))
print("scheme")
"""


@pytest.mark.parametrize("setting", ["OLMO_LNS_DIR=/x", "OLMO_LNS_DISABLE=true"])
def test_imports_and_stock_models_only_warn_and_a_scheme_stops(setting):
    """The variable may be somebody's own with our prefix, or a typing error."""
    pytest.importorskip("olmo")
    name, value = setting.split("=")
    done = forked.run(BUILDS, **{name: value})
    assert done.stdout == "stock\n" and done.returncode != 0
    first, *_, last = [line for line in done.stderr.splitlines() if name in line]
    assert "In a run with a scheme this is an error" in first and "Error: " in last
    assert done.stderr.count("In a run with a scheme") == 1


@pytest.mark.parametrize("framework", ["megatron", "transformers"])
def test_a_stray_variable_stops_a_scheme_before_anything_is_built(monkeypatch, framework):
    pytest.importorskip("megatron.core" if framework == "megatron" else framework)
    from support import megatron_tiny, transformers_models

    target = megatron_tiny.config() if framework == "megatron" else transformers_models.stock("llama")
    monkeypatch.setenv("OLMO_LNS_DIR", "/x")
    with pytest.raises(LNSConfigError, match="OLMO_LNS_DIR is unknown"):
        importlib.import_module(f"olmo_lns.integrations.{framework}").apply(target)


@pytest.mark.parametrize("command", [["train", "cfg.yaml", "--model.layer_norm_type=lns"], ["demo"]])
def test_commands_that_train_under_the_plugin_refuse_where_it_is_switched_off(command, tmp_path, monkeypatch, capsys):
    pytest.importorskip("olmo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")  # the demo would refuse this next, so nothing is trained here
    (tmp_path / "cfg.yaml").write_text("run_name: none")
    assert cli.main(command) == 1
    err = capsys.readouterr().err
    assert "Unset OLMO_LNS_DISABLE" in err and err.count("\n") == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_a_world_without_a_rank_is_an_error(tmp_path):
    """A group of one process would silently do half of the work."""
    code = "from olmo_lns.processes import process_group\nwith process_group(): print('alone')"
    env = launch.environment(WORLD_SIZE="2", RANK=None, CUDA_VISIBLE_DEVICES="")
    result = launch.run([sys.executable, "-c", code], cwd=tmp_path, env=env)
    assert result.code != 0 and "RANK" in result.last_line() and "alone" not in result.text
