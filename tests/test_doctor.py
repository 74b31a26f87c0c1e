import importlib.metadata
import os
import subprocess
import sys

import pytest

from olmo_lns import doctor


def run(*words, **environment):
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-m", "olmo_lns", "doctor", *words], capture_output=True, text=True, env=env)


def test_the_answer_comes_first_on_one_screen():
    done = run()
    lines = done.stdout.splitlines()
    assert lines[0].startswith("LayerNorm Scaling can run here with ") and len(lines) <= 12
    for name, package in (("OLMo", "ai2-olmo"), ("Megatron core", "megatron-core"), ("transformers", "transformers")):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert f"{name} {version}" in lines[0]
    assert done.returncode == 0 and lines[2].startswith("Norms run on ")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("OLMO_LNS_DISABLE=1", "OLMO_LNS_DISABLE=1 keeps it out"),
        ("OLMO_LNS_NORM_BACKEND=fast", "unknown norm backend 'fast'"),
        ("OLMO_LNS_MONITOR=evry=5", "expected every="),
        ("OLMO_LNS_MONITR=every=5", "OLMO_LNS_MONITR is unknown"),
    ],
)
def test_a_setting_that_cannot_work_is_a_problem(setting, said):
    done = run(**dict([setting.split("=", 1)]))
    assert done.returncode == 1 and said in done.stderr and done.stdout.startswith("LayerNorm Scaling")


def test_the_doctor_imports_no_framework():
    code = "import sys; from olmo_lns import doctor; doctor.examine(); print({'olmo', 'olmo_core', 'megatron.core', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_machine_without_torch_is_told_so():
    code = "import sys; sys.modules['torch'] = None; from olmo_lns import cli; sys.exit(cli.main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "torch is not installed: pip install torch" in done.stderr
    assert done.stdout.startswith("LayerNorm Scaling can run here")


def test_a_package_that_is_absent_is_named_with_its_command(capsys, monkeypatch):
    """After ``pip install ai2-olmo`` alone, OLMo lacks packages."""
    version = importlib.metadata.version

    def without_wandb(name):
        if name == "wandb":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_wandb)
    assert doctor.main(["--require", "olmo"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "olmo-lns doctor: --require olmo: lacks wandb: pip install 'olmo-lns[olmo]'\n"
    assert "OLMo " not in captured.out.splitlines()[0]
    assert doctor.main(["--require", "megatron", "--require", "test"]) == 0


def test_a_checkout_on_the_path_needs_no_metadata(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "olmo_lns", "doctor", "--require", "megatron"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.lstrip().startswith("Megatron core"))
    assert str(tmp_path) in row
