"""The patch in patches/olmo applies to the installed OLMo and to a checkout, loads the plugin once, and reverts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support import forked

PATCH = Path(__file__).parents[2] / "patches" / "olmo" / "load-plugins.patch"
PROBE = """
import olmo, olmo.model
f, depth = olmo.model.OLMo.__init__, 0
while hasattr(f, "__wrapped__"):
    f, depth = f.__wrapped__, depth + 1
print([str(m) for m in olmo.config.LayerNormType].count("lns"), depth, olmo.__file__)
"""
#: Without the hook's finder, only the patch can load the plugin.
NO_HOOK = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, 'olmo_lns_finder')]; "


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["installed", "checkout"])
def test_the_patch_loads_the_plugin_once_with_and_without_the_hook_and_reverts(tmp_path, kind):
    if kind == "checkout" and not os.environ.get("OLMO_SRC"):
        pytest.skip("OLMO_SRC does not point at an OLMo checkout")
    import olmo

    source = Path(os.environ["OLMO_SRC"] if kind == "checkout" else Path(olmo.__file__).parents[1])
    shutil.copytree(source / "olmo", tmp_path / "olmo")
    subprocess.run(["git", "apply", PATCH], cwd=tmp_path, check=True)
    for before in (NO_HOOK, ""):
        done = forked.run(before + PROBE, path=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"1 1 {tmp_path}/olmo/__init__.py"
    subprocess.run(["git", "apply", "-R", PATCH], cwd=tmp_path, check=True)
    assert (tmp_path / "olmo/__init__.py").read_bytes() == (source / "olmo/__init__.py").read_bytes()
