import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from olmo_lns import cli
from olmo_lns.errors import LNSConfigError
from olmo_lns.pip_extras import install_command


def test_our_errors_are_one_line_and_faults_keep_their_traceback(monkeypatch, capsys):
    import olmo_lns.doctor

    errors = [LNSConfigError("found 3, expected 4: do this"), KeyboardInterrupt()]
    faults = [ModuleNotFoundError("No module named 'nowhere'", name="nowhere"), ValueError("a fault")]
    monkeypatch.setattr(olmo_lns.doctor, "main", mock.Mock(side_effect=errors + faults))
    assert [cli.main(["doctor"]) for _ in errors] == [1, 130]
    expected = ["olmo-lns doctor: found 3, expected 4: do this", "olmo-lns doctor: interrupted"]
    assert capsys.readouterr().err.splitlines() == expected
    for fault in faults:  # a module of a command without an extra is a fault
        with pytest.raises(type(fault)):
            cli.main(["doctor"])


def test_importing_the_package_loads_no_framework():
    code = "import sys, olmo_lns; olmo_lns.lns_factor(2); print(*{'torch', 'olmo', 'megatron', 'numpy', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def shell(command, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(command, shell=True, executable="/bin/bash", capture_output=True, env=env)


OLMO_LNS = f"{sys.executable} -m olmo_lns"


def test_the_launcher_runs_a_script_as_python_would_and_says_when_a_flag_had_no_effect(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "real" / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__':\n    print(beside.VALUE, sys.argv[1:])\n")
    (tmp_path / "link.py").symlink_to(script)
    done = shell(f"{OLMO_LNS} {tmp_path}/link.py --layernorm-scaling b")
    assert done.stdout == b"7 ['--layernorm-scaling', 'b']\n" and b"--layernorm-scaling had no effect" in done.stderr
    missing, off = shell(f"{OLMO_LNS} nowhere.py"), shell(f"{OLMO_LNS} {script}", OLMO_LNS_DISABLE="1")
    assert (missing.returncode, off.returncode) == (2, 2)
    assert b"'nowhere.py' is neither a script nor a command" in missing.stderr and missing.stderr.count(b"\n") == 1
    assert b"OLMO_LNS_DISABLE=1 is set, but the launcher needs the plugin. Unset OLMO_LNS_DISABLE" in off.stderr


ABSENT = (
    "olmo,olmo_core,hf_olmo,megatron,omegaconf,tokenizers,transformers,safetensors,matplotlib,datasets,wandb,accelerate"
)
CONFIGS = Path(__file__).parents[1] / "configs"


def without(*words):
    """Run a command in a process that cannot import some packages."""
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}.split(',')));" + (
        "from olmo_lns.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra_in_one_line():
    config = CONFIGS / "olmo" / "60M-lns.yaml"
    for words in (["train", config], ["analyze", "variance", "--model", "owner/gpt2", "--data", config]):
        done = without(*words)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert install_command(cli.COMMANDS[words[0]].extra) in done.stderr


def test_the_base_dependencies_are_enough_for_data_and_megatron_plans(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"\1\0" * 4096)
    done = without("data", "check", tmp_path, "--budget", "0", "--eos", "1", "--sequence", "64")
    assert done.returncode == 0, done.stderr
    done = without("study", "plan", CONFIGS / "study" / "paper-megatron.yaml")
    assert done.returncode == 0 and "7B" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["analyze", "varience"], "invalid choice: 'varience' (choose from"),
        (["analyze", "gradnorm", "--model", "x", "--data", "y", "--tokes", "5"], "unrecognized arguments: --tokes 5"),
        (
            ["analyze", "variance", "--model", "x", "--data", "y", "--tokens", "0"],
            "'0' is not accepted. Pass a whole number of at least 1",
        ),
        (["analyze", "variance"], "required: --model, --data"),
        (["data", "fetch", "dolma", "--out", ""], "argument -o/--out: the path is empty. Pass a path"),
    ],
)
def test_wrong_usage_is_two_lines(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    first, second, *rest = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and said in first and "--help`" in second and not rest


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["analyse"], 2, "(did you mean 'analyze'?)"),
        (
            ["study", "plan", "paper", "--only", "13B"],
            1,
            "No run of study paper begins with '13B' (did you mean '1B'?). Pass the beginning of one of these names: 60M-",
        ),
        (["train", "61M-lns"], 1, "The file 61M-lns was not found (did you mean '60M-lns'?). Pass the path of a file"),
        (["config", "copy", "olmo/60M-lns.yaml", "-o", "/dev/null/x"], 1, "/dev/null"),
    ],
)
def test_an_error_is_one_line_with_the_known_names_or_the_file(words, code, said, capsys):
    if words[0] == "train":
        pytest.importorskip("olmo", reason="needs ai2-olmo")
    assert cli.main(words) == code
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_names_that_no_locale_can_print_are_printed_and_a_closed_pipe_is_no_traceback():
    done = shell(f"{OLMO_LNS} analyze compare $'\\xff\u0436'", PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and done.stderr.startswith(b"olmo-lns analyze: ??"), done.stderr
    assert b"Traceback" not in shell(f"{OLMO_LNS} config list | head -c 1").stderr


def test_a_file_is_written_whole_or_not_at_all_and_through_a_link(tmp_path):
    from olmo_lns.atomic import write_atomically

    path, link = tmp_path / "a.txt", tmp_path / "link.txt"
    link.symlink_to("a.txt")  # it dangles until the first write
    write_atomically(link, "é…")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_bytes() == "é…".encode() and link.is_symlink() and len(list(tmp_path.iterdir())) == 2
