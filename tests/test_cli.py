from __future__ import annotations

import subprocess
import sys

import pytest

from olmo_lns import __version__, cli
from olmo_lns.errors import LNSConfigError


def test_help_lists_every_command(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"olmo-lns {__version__}"


def test_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["docter"]) == 2
    assert "Did you mean 'doctor'?" in capsys.readouterr().err


def test_errors_of_ours_are_one_line(monkeypatch, capsys):
    import olmo_lns.doctor

    def fail(argv):
        raise LNSConfigError("found 3, expected 4: do this")

    monkeypatch.setattr(olmo_lns.doctor, "main", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "olmo-lns doctor: found 3, expected 4: do this\n"


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"olmo-lns {command}" in capsys.readouterr().out


def test_importing_the_package_loads_no_framework():
    code = (
        "import sys, olmo_lns; olmo_lns.lns_scale(2); "
        "print([m for m in ('torch', 'olmo', 'megatron', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_launcher_runs_a_script_as_python_would(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nif __name__ == '__main__':\n    print(beside.VALUE, sys.argv[1:])\n")
    done = subprocess.run(
        [sys.executable, "-m", "olmo_lns", str(script), "--a=1", "b"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "7 ['--a=1', 'b']"


def test_launcher_names_a_missing_script(tmp_path):
    done = subprocess.run([sys.executable, "-m", "olmo_lns", "nowhere.py"], capture_output=True, text=True)
    assert done.returncode == 2 and "no script 'nowhere.py'" in done.stderr and done.stderr.count("\n") == 1
