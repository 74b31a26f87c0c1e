import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from olmo_lns import cli
from olmo_lns.errors import LNSConfigError


def test_our_errors_are_one_line_and_faults_keep_their_traceback(monkeypatch, capsys):
    import olmo_lns.doctor

    errors = [
        LNSConfigError("found 3, expected 4: do this"),
        KeyboardInterrupt(),
        RecursionError(),
        ModuleNotFoundError("No module named 'nowhere'", name="nowhere"),
        ValueError("a fault"),
    ]
    monkeypatch.setattr(olmo_lns.doctor, "main", mock.Mock(side_effect=errors))
    assert [cli.main(["doctor"]) for _ in range(3)] == [1, 130, 1]
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "olmo-lns doctor: found 3, expected 4: do this"
    assert second.endswith("interrupted") and third.endswith("nested too deeply, or contains itself")
    for kind in (ModuleNotFoundError, ValueError):  # a module that no extra brings is a fault
        with pytest.raises(kind):
            cli.main(["doctor"])


def test_importing_the_package_loads_no_framework():
    code = (
        "import sys, olmo_lns; olmo_lns.lns_scale(2); "
        "print([m for m in ('torch', 'olmo', 'megatron', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def launched(*words, **environment):
    command = [sys.executable, "-m", "olmo_lns", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_launcher_runs_a_script_as_python_would(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__':\n    print(beside.VALUE, sys.argv[1:])\n")
    assert launched(script, "--a=1", "b").stdout.strip() == "7 ['--a=1', 'b']"
    missing, off = launched("nowhere.py"), launched(script, OLMO_LNS_DISABLE="1")
    assert (missing.returncode, off.returncode) == (2, 2)
    assert "no script 'nowhere.py'" in missing.stderr and missing.stderr.count("\n") == 1
    assert "OLMO_LNS_DISABLE=1 is set, but the launcher was asked for: unset OLMO_LNS_DISABLE" in off.stderr


#: Runs a command in a process whose import system does not find some packages.
WITHOUT = """
import importlib.machinery, sys
absent, finder = set(sys.argv[1].split(",")), importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in absent else finder(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
from olmo_lns.cli import main
sys.exit(main(sys.argv[2:]))
"""
ABSENT = "olmo,olmo_core,hf_olmo,megatron,omegaconf,tokenizers,transformers,safetensors,matplotlib,tensorboard,datasets,wandb,accelerate"
CONFIGS = Path(__file__).parents[1] / "configs"


def without(*words):
    return subprocess.run([sys.executable, "-c", WITHOUT, ABSENT, *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("train", CONFIGS / "olmo" / "60M-lns.yaml"), "olmo"),
        (("analyze", "variance", "--model", "gpt2", "--data", CONFIGS / "olmo" / "60M-lns.yaml"), "analysis"),
        (("hf", "init", "llama", "-o", CONFIGS / "x"), "hf"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra_in_one_line(words, extra):
    done = without(*words)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"pip install 'olmo-lns[{extra}" in done.stderr


def test_the_base_dependencies_are_enough_for_data_and_megatron_plans(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"\1\0" * 4096)
    done = without("data", "check", tmp_path, "--budget", "0", "--eos", "1", "--sequence", "64")
    assert done.returncode == 0, done.stderr
    done = without("study", "plan", CONFIGS / "study" / "paper-megatron.yaml")
    assert done.returncode == 0 and "7B" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("study", "plan", CONFIGS / "study" / "paper-megatron.yaml", "--csv", "/dev/full"),
        ("config", "copy", "olmo/60M-lns.yaml", "-o", "/dev/null/x"),
        ("hf", "init", "llama", "-o", "/dev/null/x"),
    ],
    ids=["full", "file", "folder"],
)
def test_a_target_that_cannot_be_written_is_named(words, capsys):
    assert cli.main([str(word) for word in words]) == 1
    err = capsys.readouterr().err
    assert ("No space left" if "/dev/full" in words else "/dev/null") in err and err.count("\n") == 1, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("n_layers: 4", "n_layers: 10000000", "10,?000,?000"),
        ("n_layers: 4", "n_layers: four", "four"),
        ("n_layers: 4", "n_layers: 4\n  x: &x [*x]", "alias|recursive"),
    ],
    ids=["layers", "type", "recursive"],
)
def test_a_config_that_makes_no_model_is_refused_at_once(old, new, said, tmp_path, capsys):
    """Without the check, ten million layers were built for nine minutes."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from support.exports import save_olmo
    from support.launch import write_config

    def damaged(path):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return str(path)

    save_olmo(tmp_path / "lns", layer_norm_type="lns_rms")
    damaged(tmp_path / "lns" / "config.yaml")
    config = damaged(write_config(tmp_path / "run", **{"model.layer_norm_type": "lns_rms"}))
    stock = damaged(write_config(tmp_path / "stock", **{"model.layer_norm_type": "rms"}))
    folder, data = str(tmp_path / "lns"), str(tmp_path / "run" / "data.npy")
    for words in (
        ["analyze", "variance", "--model", folder, "--data", data, "--quiet"],
        ["export", folder, str(tmp_path / "out")],
        ["config", "check", stock],
        ["train", config],
    ):
        start = time.monotonic()
        assert cli.main(words) == 1, words
        out, err = capsys.readouterr()
        assert re.search(said, out + err), (words, out, err)
        assert err.count("\n") <= 1 and time.monotonic() - start < 60, (words, err)


def test_a_reader_that_stops_early_causes_no_error():
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m olmo_lns config list | head -c 1",
        shell=True, executable="/bin/bash", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout and done.stderr == "" and done.returncode in (0, 141)
