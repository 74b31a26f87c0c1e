"""The start-up hook. Each test starts new interpreters that run it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import olmo_lns

HOOK = Path(olmo_lns.__file__).parent / "integrations" / "olmo_lns_autoload.pth"


def run(code, *, path=None, check=True, **environment):
    """Run ``code`` in an interpreter that has executed the hook as ``site`` does."""
    env = {**os.environ, **environment}
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")])
    boot = f"import sys\nif not any(getattr(f, 'olmo_lns_start_up', 0) for f in sys.meta_path):\n    exec({HOOK.read_text()!r})\n"
    return subprocess.run(
        [sys.executable, "-c", boot + textwrap.dedent(code)], capture_output=True, text=True, env=env, check=check
    )


@pytest.fixture
def plugin(tmp_path):
    """Make a framework called ``olmo`` and a plugin for it, with real entry-point metadata."""

    def make(body="print('plugin ran')", framework="class OLMo: pass\nclass TrainConfig: pass\n"):
        (tmp_path / "olmo").mkdir()
        (tmp_path / "olmo" / "__init__.py").write_text(framework + "print('framework ran')\n")
        (tmp_path / "lns_test_plugin.py").write_text(f"def register():\n    {body}\n")
        info = tmp_path / "lns_test_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lns-test-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[olmo.plugins]\nprobe = lns_test_plugin:register\n")
        return tmp_path

    return make


# Load the probe only: the real plugin would refuse this fake framework.
ONLY_PROBE = """
import importlib.metadata as md
_all = md.entry_points
md.entry_points = lambda **k: [e for e in _all(**k) if e.name == 'probe']
"""


def test_a_plugin_runs_once_after_its_framework_but_not_when_disabled_or_for_a_namesake(plugin):
    folder = plugin()
    assert run(ONLY_PROBE + "import olmo, importlib\nimport olmo", path=folder).stdout == "framework ran\nplugin ran\n"
    assert run(ONLY_PROBE + "import olmo", path=folder, OLMO_LNS_DISABLE="1").stdout == "framework ran\n"
    (folder / "olmo" / "__init__.py").write_text("print('framework ran')\n")
    assert run(ONLY_PROBE + "import olmo", path=folder).stdout == "framework ran\n"


def test_the_hook_imports_no_framework_and_a_missing_one_is_an_ordinary_import_error():
    code = "print([m for m in sys.modules if m.startswith(('olmo', 'megatron', 'importlib.metadata'))])\n"
    code += "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    code += f"sys.path.append({str(HOOK.parents[2])!r})\n"
    code += "try:\n    import olmo\nexcept ModuleNotFoundError as e:\n    print(e.name)"
    assert run(code).stdout == "[]\nolmo\n"


def test_a_failing_plugin_fails_every_import_and_is_named(plugin):
    code = """
    for attempt in range(2):
        try:
            import olmo
        except Exception as error:
            print(error)
    """
    done = run(ONLY_PROBE + textwrap.dedent(code), path=plugin("raise RuntimeError('out of order')"))
    assert done.stdout.count("plugin 'probe' (lns_test_plugin:register, group olmo.plugins) failed: out of order") == 2


def test_on_import_calls_back_at_once_or_at_the_import_and_an_error_fails_the_import(tmp_path):
    (tmp_path / "lns_later.py").write_text("VALUE = 1\n")
    code = """
    from olmo_lns.integrations.autoload import on_import
    seen = []
    on_import('lns_later', lambda m: seen.append(m.VALUE))
    assert seen == []
    import lns_later
    assert seen == [1]
    on_import('lns_later', lambda m: seen.append('now'))
    assert seen == [1, 'now']
    import inspect
    assert 'VALUE' in inspect.getsource(lns_later) and type(lns_later.__loader__).__name__ == 'SourceFileLoader'
    del sys.modules['lns_later']
    def refuse(module):
        raise ValueError('no')
    on_import('lns_later', refuse)
    try:
        import lns_later
    except ValueError:
        assert 'lns_later' not in sys.modules
        print('refused')
    """
    assert run(code, path=tmp_path).stdout.strip() == "refused"


def test_importing_the_real_olmo_is_enough_to_register_the_type():
    code = "from olmo.config import LayerNormType\nprint(LayerNormType('lns'))"
    assert run(code).stdout.strip().endswith("lns")
    assert "'lns' is not a valid LayerNormType" in run(code, check=False, OLMO_LNS_DISABLE="1").stderr


def test_a_plugin_runs_beside_other_finders_and_when_autoload_is_imported_first(plugin):
    """One has only ``find_module``. The other finds a framework outside ``sys.path``, as in an editable install."""
    folder = plugin()
    (folder / "olmo").rename(folder / "tree")
    code = f"""if True:
    class Old:
        def find_module(self, name, path=None): pass
    class Editable:
        def find_spec(self, name, path=None, target=None):
            from importlib.util import spec_from_file_location
            return spec_from_file_location(name, {str(folder / "tree" / "__init__.py")!r}) if name == "olmo" else None
    sys.meta_path.insert(0, Old())
    names = [getattr(finder, "__name__", "") for finder in sys.meta_path]
    sys.meta_path.insert(names.index("PathFinder"), Editable())  # or the real OLMo would be found
    import olmo_lns.integrations.autoload, olmo
    """
    warnings = {"PYTHONWARNINGS": "ignore"}  # Python warns about the old finder
    assert "plugin ran" in run(ONLY_PROBE + code, path=folder, **warnings).stdout


@pytest.mark.parametrize("name", ["olmo", "transformers", "megatron"])
def test_when_disabled_nothing_of_olmo_lns_is_imported(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("")
    code = f"import {name}\nprint([m for m in sys.modules if m.startswith('olmo_lns')])"
    assert run(code, path=tmp_path, OLMO_LNS_DISABLE="1").stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "stops"), [("transformers", False), ("olmo", True)])
def test_a_moved_checkout_stops_olmo_but_not_transformers(tmp_path, name, stops):
    (tmp_path / f"{name}.py").write_text("")
    gone = "sys.modules['olmo_lns'] = None\n"  # as in an editable installation whose folder was moved
    done = run(gone + f"import {name}\nprint('imported')", path=tmp_path, check=False)
    assert ("imported" in done.stdout) != stops
    assert "its code is not where it was" in done.stderr and "OLMO_LNS_DISABLE=1" in done.stderr
    assert run(gone + f"import {name}", path=tmp_path, OLMO_LNS_DISABLE="1").stderr == ""


def test_the_hook_and_autoload_watch_for_the_same_names():
    from olmo_lns.integrations.autoload import WATCHED

    assert f"name not in{WATCHED!r}".replace(" ", "").replace('"', "'") in HOOK.read_text().replace(" ", "")


@pytest.mark.slow
def test_installing_the_package_is_enough_to_guard_olmos_converters(tmp_path):
    """OLMo's script imports transformers and never OLMo. ``hf_olmo``'s converter is guarded at its import."""
    (tmp_path / "config.yaml").write_text(
        "model:\n  layer_norm_type: lns_rms\n  d_model: 8\n  n_heads: 2\n  n_layers: 2\n"
    )
    script = tmp_path / "convert_olmo_to_hf_new.py"
    script.write_text("from transformers import OlmoConfig\nOlmoConfig()\nprint('would convert')\n")
    code = f"import sys, runpy; sys.argv = [{str(script)!r}, '--input_dir', {str(tmp_path)!r}]\n"
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    of_hf_olmo = f"from hf_olmo.convert_olmo_to_hf import write_config\nwrite_config({str(tmp_path)!r})"
    for each in (code, of_hf_olmo):
        done = run(each, check=False)
        assert done.returncode != 0 and "OLMO_LNS_ALLOW_MISMATCH=lns-to-preln" in done.stderr
        assert "would convert" not in done.stdout and not (tmp_path / "config.json").exists()
    assert run(code, OLMO_LNS_DISABLE="1").stdout == "would convert\n"
