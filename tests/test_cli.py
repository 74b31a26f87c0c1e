import json
import os
import subprocess
import sys
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
    assert second.endswith("interrupted") and third.endswith("nested too deeply or contains itself")
    for kind in (ModuleNotFoundError, ValueError):  # a module of a command without an extra is a fault
        with pytest.raises(kind):
            cli.main(["doctor"])


def test_importing_the_package_loads_no_framework():
    code = "import sys, olmo_lns; olmo_lns.lns_scale(2); print(*{'torch', 'olmo', 'megatron', 'numpy', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def shell(command, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(command, shell=True, executable="/bin/bash", capture_output=True, env=env)


OLMO_LNS = f"{sys.executable} -m olmo_lns"


def test_the_launcher_runs_a_script_as_python_would(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "real" / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__':\n    print(beside.VALUE, sys.argv[1:])\n")
    (tmp_path / "link.py").symlink_to(script)
    assert shell(f"{OLMO_LNS} {tmp_path}/link.py --a=1 b").stdout == b"7 ['--a=1', 'b']\n"
    missing, off = shell(f"{OLMO_LNS} nowhere.py"), shell(f"{OLMO_LNS} {script}", OLMO_LNS_DISABLE="1")
    assert (missing.returncode, off.returncode) == (2, 2)
    assert b"no script 'nowhere.py'" in missing.stderr and missing.stderr.count(b"\n") == 1
    assert b"OLMO_LNS_DISABLE=1 is set, but the launcher needs the plugin: unset OLMO_LNS_DISABLE" in off.stderr


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


def test_a_target_that_cannot_be_written_is_named(capsys):
    assert cli.main(["config", "copy", "olmo/60M-lns.yaml", "-o", "/dev/null/x"]) == 1
    err = capsys.readouterr().err
    assert "/dev/null" in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["analyze", "varience"], "(did you mean 'variance'?)"),
        (["analyze", "gradnorm", "--model", "x", "--data", "y", "--tokes", "5"], "(did you mean '--tokens'?)"),
        (["demo", "--step", "5", "--lyers=3"], "(did you mean '--layers'?)"),
        (["doctor", "--require", "megatrn"], "(did you mean 'megatron'?)"),
        (["demo", "--steps", "0"], "expected a whole number >= 1, found '0'"),
        (["analyze", "variance"], "required: --model, --data"),
    ],
)
def test_wrong_usage_is_two_lines_with_the_nearest_name(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    first, second, *rest = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and said in first and "--help`" in second and not rest


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["analyse"], 2, "(did you mean 'analyze'?)"),
        (["study", "plan", "paper", "--only", "13B"], 1, "no run of study paper begins with '13B'; its runs: 60M-"),
        (["train", "61M-lns"], 1, "61M-lns: no such file here or in the pack, which has 150M-lns.yaml"),
    ],
)
def test_a_misspelt_command_size_or_config_is_one_line_with_the_known_names(words, code, said, capsys):
    assert cli.main(words) == code
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_no_locale_can_print_are_printed_and_written(encoding, tmp_path):
    """A byte of a path that is no UTF-8, in an error, and as what tells two results of one label apart in a table."""
    assert shell(f"{OLMO_LNS} $'no-\\xff'", PYTHONIOENCODING=encoding).stderr.startswith(b"olmo_lns: no script 'no-")
    content = {"format": 2, "what": "variance", "tokens": 4, "blocks": {"variance": [1, 2]}, "label": "√"}
    for name in (b"\xff.json", "Ж.json".encode()):
        (tmp_path / os.fsdecode(name)).write_text(json.dumps(content))
    words = "analyze compare *.json --table table.csv"
    done = shell(f"cd {tmp_path} && {OLMO_LNS} {words}", PYTHONIOENCODING=encoding, LC_ALL="C.UTF-8")
    assert done.returncode == 0 and b"Written: table.csv" in done.stdout, done.stderr
    written = (tmp_path / "table.csv").read_text(encoding="utf-8")
    assert "Ж.json" in written and "\ufffd.json" in written


@pytest.mark.parametrize(
    ("words", "where", "code"),
    [
        ("config list", ">&-", 0),
        ("--help", "2>&- >&-", 0),
        ("--help", "> /dev/full", 1),
        ("config list", "> /dev/full", 1),
        ("analyse", "2>&-", 2),  # its only line has no place to go
        ("doctor", ">&- <&-", 0),
        ("config list", "| head -c 1", 0),
    ],
)
def test_a_standard_output_that_is_closed_full_or_left_is_no_traceback(words, where, code):
    done = shell(f"{OLMO_LNS} {words} {where}")
    assert done.returncode == code and b"Traceback" not in done.stderr and b"Exception" not in done.stderr, done.stderr


def test_a_file_is_written_whole_or_not_at_all_and_through_a_link(tmp_path):
    from olmo_lns.text import write_whole

    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    link.symlink_to("a.txt")  # it dangles until the first write
    write_whole(link, "é…")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_bytes() == "é…".encode() and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_the_launcher_says_when_a_flag_had_no_effect(tmp_path):
    (tmp_path / "other.py").write_text("import sys; sys.exit(3)")
    command = [sys.executable, "-m", "olmo_lns", tmp_path / "other.py", "--layernorm-scaling"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3 and "--layernorm-scaling had no effect" in done.stderr
