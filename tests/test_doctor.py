import importlib.metadata
import json
import subprocess
import sys

import pytest

from olmo_lns import doctor
from olmo_lns.pip_extras import install_command, unsupported


def test_the_answer_comes_first_on_one_screen(capsys):
    assert doctor.main(["--require", "megatron", "--require", "test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("LayerNorm Scaling can run here with ") and len(lines) <= 12
    for name, package in (("OLMo", "ai2-olmo"), ("transformers", "transformers")):
        assert f"{name} {importlib.metadata.version(package)}" in lines[0]
    assert lines[2].startswith("Norms run on ")


def test_olmo_core_is_not_recommended_beside_olmo(capsys):
    """ai2-olmo requires a version of OLMo-core that has no models; the guide keeps the two apart."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "OLMo-core cannot be installed beside ai2-olmo." in text and "olmo-lns[olmo-core]" not in text


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("OLMO_LNS_DISABLE=1", "OLMO_LNS_DISABLE=1 switches the plugin off"),
        ("OLMO_LNS_NORM_BACKEND=fast", "unknown norm backend 'fast'"),
        ("OLMO_LNS_MONITOR=evry=5", "Expected every="),
        ("OLMO_LNS_MONITR=every=5", "OLMO_LNS_MONITR is unknown"),
    ],
)
def test_a_setting_that_cannot_work_is_a_problem(setting, said, monkeypatch, capsys):
    monkeypatch.setenv(*setting.split("=", 1))
    assert doctor.main([]) == 1
    done = capsys.readouterr()
    assert said in done.err and done.out.startswith("LayerNorm Scaling")


def test_the_doctor_imports_no_framework_and_says_where_torch_is_missing():
    code = (
        "import sys; sys.modules['torch'] = None; from olmo_lns import cli; code = cli.main(['doctor']); "
        "print({'olmo', 'olmo_core', 'megatron.core', 'transformers'} & set(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.returncode == 1
        and "torch could not be imported" in done.stderr
        and "Run: pip install torch" in done.stderr
    )
    assert done.stdout.startswith("LayerNorm Scaling can run here") and done.stdout.endswith("\nset()\n")


def test_a_package_that_is_absent_is_named_with_its_command(capsys, monkeypatch):
    """After ``pip install ai2-olmo`` alone, OLMo lacks packages."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    version = importlib.metadata.version

    def without_wandb(name):
        if name == "wandb":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_wandb)
    assert doctor.main(["--require", "olmo"]) == 1
    expected = f"olmo-lns doctor: --require olmo: wandb is missing. Run: {install_command('olmo')}\n"
    assert capsys.readouterr().err == expected


def test_a_checkout_on_the_path_needs_no_metadata(tmp_path, monkeypatch, capsys):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.main(["--require", "megatron"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("Megatron core"))
    assert str(tmp_path) in row


def test_an_extra_that_a_python_cannot_install_is_refused_with_the_python_that_can():
    """numpy 1.26, which ai2-olmo needs, has no wheel for Python 3.13. Nothing else has a limit."""
    extras = importlib.metadata.metadata("olmo-lns").get_all("Provides-Extra")
    assert {extra: unsupported(extra, "3.12") for extra in extras} == dict.fromkeys(extras, "")
    refused = {extra: text for extra in extras if (text := unsupported(extra, "3.13"))}
    assert list(refused) == ["olmo"] and refused["olmo"] == (
        "ai2-olmo cannot be installed on Python 3.13. It needs a Python before 3.13. Create an environment with such a "
        f"Python, and run there: {install_command('olmo')}"
    )
    if sys.version_info >= (3, 13):
        assert doctor.missing_packages("olmo") == unsupported("olmo")


@pytest.mark.parametrize(
    ("recorded", "target"),
    [
        ({"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}}, "'/home/me/my clone[hf]'"),
        (
            {"url": "file:///tmp/olmo_lns-0.2.0-py3-none-any.whl", "archive_info": {}},
            "'/tmp/olmo_lns-0.2.0-py3-none-any.whl[hf]'",
        ),
        ({"url": "https://host/olmo-lns", "vcs_info": {"vcs": "git"}}, "'olmo-lns[hf] @ git+https://host/olmo-lns'"),
        (None, "'olmo-lns[hf]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(recorded, target, tmp_path, monkeypatch):
    """The files are those that pip writes for each kind of source."""
    about = tmp_path / "olmo_lns-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: olmo-lns\nVersion: 0\n")
    if recorded:
        (about / "direct_url.json").write_text(json.dumps(recorded))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command("hf") == f"pip install {target}"
