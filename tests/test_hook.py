"""The start-up hook and ``wrap``. A test of the hook runs in a new interpreter, or in a fork of one that has imported torch."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import forked

import olmo_lns
from olmo_lns import hook
from olmo_lns.errors import UpstreamChangedError

needs_olmo = pytest.mark.skipif(importlib.util.find_spec("olmo") is None, reason="needs ai2-olmo")
HOOK = Path(olmo_lns.__file__).parent / "integrations" / "olmo_lns_autoload.pth"
BOOT = f"""
import sys
if not any(getattr(finder, "olmo_lns_finder", 0) for finder in sys.meta_path):
    exec({HOOK.read_text()!r})
"""


def run(code, *, path=None, check=True, **environment):
    """Run ``code`` in an interpreter that has executed the hook as ``site`` does."""
    env = {**os.environ, **environment}
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", BOOT + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=check)


def before_olmo(code, **how):
    """Return the output of ``code``, without start-up lines, in a fork of an interpreter that has imported torch."""
    done = forked.run(BOOT + textwrap.dedent(code), **how)
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(line for line in lines if not line.startswith("LayerNorm Scaling on: ")).strip()


#: Trains nothing: builds under LNS, and prints the factors.
BUILD = """
def build():
    from olmo.config import LayerNormType, ModelConfig
    from olmo.model import OLMo
    sizes = dict(d_model=16, n_heads=2, n_layers=2, vocab_size=16, embedding_size=16, max_sequence_length=8, init_device="cpu")
    config = ModelConfig(layer_norm_type=LayerNormType("lns_rms"), rope=True, **sizes)
    return [round(block.attn_norm.lns_scale, 3) for block in OLMo(config).transformer.blocks]
"""
BUILT = "[1.0, 0.707]"


@needs_olmo
def test_importing_the_real_olmo_is_enough_and_a_disabled_hook_imports_nothing():
    code = "import olmo.train\nfrom olmo_lns.hook import is_wrapped\nprint(build(), is_wrapped(olmo.train.Trainer.fit))"
    assert before_olmo(BUILD + code) == f"{BUILT} True"
    code = (
        "import os, sys, olmo\nprint([m for m in sys.modules if m.startswith('olmo_lns')])\nolmo.LayerNormType('lns')"
    )
    done = before_olmo("import os; os.environ['OLMO_LNS_DISABLE'] = '1'\n" + code)
    assert done.startswith("[]\n") and "'lns' is not a valid LayerNormType" in done


def test_the_hook_imports_nothing_and_a_missing_framework_is_an_ordinary_import_error():
    code = "print([m for m in sys.modules if m.startswith(('olmo', 'megatron', 'importlib.metadata'))])\n"
    code += "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    code += f"sys.path.append({str(HOOK.parents[2])!r})\n"
    code += "try:\n    import olmo\nexcept ModuleNotFoundError as e:\n    print(e.name)"
    assert run(code).stdout == "[]\nolmo\n"


@pytest.mark.parametrize(("name", "stops"), [("transformers", False), ("olmo", True)])
def test_a_moved_checkout_stops_olmo_but_not_transformers(tmp_path, name, stops):
    (tmp_path / f"{name}.py").write_text("")
    gone = "sys.modules['olmo_lns'] = None\n"  # as in an editable installation whose folder was moved
    done = run(gone + f"import {name}\nprint('imported')", path=tmp_path, check=False)
    assert ("imported" in done.stdout) != stops
    assert "its code is not where it was" in done.stderr and "OLMO_LNS_DISABLE=1" in done.stderr
    assert run(gone + f"import {name}", path=tmp_path, OLMO_LNS_DISABLE="1").stderr == ""


def test_a_namesake_of_olmo_is_imported_as_it_is(tmp_path):
    (tmp_path / "olmo").mkdir()
    for name in ("__init__", "config", "model", "train"):
        (tmp_path / "olmo" / f"{name}.py").write_text("VALUE = 1\n")
    code = "import olmo.config, olmo.model, olmo.train\nprint(olmo.train.VALUE, list(vars(olmo.model))[-1])"
    done = run(code, path=tmp_path)
    assert done.stdout == "1 VALUE\n" and done.stderr == ""


# Finders of other people that answer first

#: A finder for OLMo's modules that loads each by ``change(spec)``.
OTHER_FINDER = """
import sys
from importlib import machinery, util
class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = machinery.PathFinder.find_spec(name, path) if name.split(".")[0] == "olmo" else None
        if spec is not None and isinstance(spec.loader, machinery.SourceFileLoader):
            spec.loader = change(spec)
        return spec
sys.meta_path.insert(0, Finder())
"""
FINDERS = {
    "typeguard": "import typeguard; typeguard.install_import_hook('olmo')",
    "jaxtyping": "import jaxtyping; jaxtyping.install_import_hook('olmo', None)",
    "pytest": """
from _pytest import assertion
from _pytest.config import get_config
assertion.install_importhook(get_config()).mark_rewrite("olmo")
""",
    "one without room on its loader": OTHER_FINDER + """
class Loader:
    __slots__ = ("loader",)
    def create_module(self, spec): return None
    def exec_module(self, module): self.loader.exec_module(module)
def change(spec):
    made = Loader()
    made.loader = spec.loader
    return made
""",
    "a path hook in front, as beartype.claw": """
import sys
from importlib import machinery
class Loader(machinery.SourceFileLoader):
    def source_to_code(self, data, path, **more): return super().source_to_code(data, path, **more)
extension = (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES)
sys.path_hooks.insert(0, machinery.FileFinder.path_hook(extension, (Loader, machinery.SOURCE_SUFFIXES)))
sys.path_importer_cache.clear()
""",
}  # fmt: skip


@needs_olmo
@pytest.mark.parametrize("name", FINDERS)
def test_the_plugin_is_loaded_where_another_finder_answers_first(name):
    if name in ("typeguard", "jaxtyping"):
        pytest.importorskip(name, reason=f"needs pip install {name}")
    assert before_olmo(f"{FINDERS[name]}\n{BUILD}print(build())") == BUILT


@needs_olmo
def test_a_scheme_is_there_or_stops_where_a_finder_executes_at_the_first_use():
    lazy = f"{OTHER_FINDER}change = lambda spec: util.LazyLoader(spec.loader)\n{BUILD}print(build())"
    assert (done := before_olmo(lazy)) == BUILT or "UpstreamChangedError" in done


# Stand-ins in sys.modules: nothing asked for a scheme, so nothing may fail

STAND_INS = {
    "MagicMock": "from unittest.mock import MagicMock as stand_in",
    "SimpleNamespace": "from types import SimpleNamespace as stand_in",
    "bare module": "from types import ModuleType\nstand_in = lambda: ModuleType('stand_in')",
    "None": "stand_in = lambda: None",
    "a module whose attributes raise": "from types import ModuleType\nclass stand_in(ModuleType):\n    def __init__(self): super().__init__('stand_in')\n    def __getattribute__(self, name): raise RuntimeError(name)",
}  # fmt: skip
NAMES = ("olmo", "olmo.config", "olmo.train", "olmo_core", "megatron.core", "transformers.trainer")


@pytest.mark.parametrize("kind", STAND_INS)
def test_stand_ins_in_sys_modules_do_not_fail_an_import(kind):
    code = f"import sys\n{STAND_INS[kind]}\nfor name in {NAMES!r}:\n    sys.modules[name] = stand_in()\n"
    code += "import transformers.models.auto.configuration_auto, megatron, colorsys\nprint('imported')"
    assert before_olmo(code) == "imported"


# Modules that are executed again

AGAIN = {
    "reload of the config and the model": "importlib.reload(olmo.config); importlib.reload(olmo.model)",
    "reload after a finder was put in front": "import typeguard; typeguard.install_import_hook('olmo'); importlib.reload(olmo.model); import tabnanny",
    "deleted and imported again": "for name in [n for n in sys.modules if n.split('.')[0] == 'olmo']: del sys.modules[name]\nimport olmo.train",
    "executed by its own spec": "module = importlib.util.module_from_spec(olmo.model.__spec__); sys.modules['olmo.model'] = olmo.model = module; module.__spec__.loader.exec_module(module)",
    "imported while sys.modules was patched": "from unittest.mock import patch\nfor name in [n for n in sys.modules if n.split('.')[0] == 'olmo']: del sys.modules[name]\nwith patch.dict(sys.modules): import olmo.train\nimport olmo.train",
}  # fmt: skip


@needs_olmo
@pytest.mark.parametrize("name", AGAIN)
def test_a_module_that_is_executed_again_is_wrapped_again_and_once(name):
    code = """
f, depth = sys.modules["olmo.model"].OLMo.__init__, 0
while hasattr(f, "__wrapped__"): f, depth = f.__wrapped__, depth + 1
import olmo.train
from olmo_lns.hook import is_wrapped
print(build(), depth, is_wrapped(olmo.train.Trainer.restore_sharded_checkpoint))
"""
    first = f"{BOOT}import importlib.util, olmo.train, typeguard"
    code = f"import sys, importlib.util, olmo.train\n{AGAIN[name]}\n{BUILD}{code}"
    assert before_olmo(code, first=first) == f"{BUILT} 1 True"


@needs_olmo
def test_a_scheme_is_refused_where_the_module_that_loads_checkpoints_is_missing():
    code = "import sys\nsys.modules['olmo.train'] = None  # as if this OLMo had no such module\n"
    code += "from olmo import OLMo, ModelConfig\nprint(len(OLMo(ModelConfig(n_layers=1)).transformer.blocks))\n"
    done = before_olmo(f"{code}{BUILD}print(build())").splitlines()
    assert done[0] == "1" and "UpstreamChangedError" in done[-1]
    assert "lacks what olmo-lns needs: the module olmo.train was not found" in done[-1]


# wrap

SOURCE = """
class Upstream:
    @classmethod
    def build(cls, a, b=2):
        "What it does."
        return (cls.__name__, a, b)

    @staticmethod
    def plain(a):
        return a

    def method(self, a):
        return a + 1
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    (tmp_path / "lns_fake_upstream.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hook, "_problems", {})
    import lns_fake_upstream

    yield lns_fake_upstream
    del sys.modules["lns_fake_upstream"]


def doubled(function):
    return lambda *args, **kwargs: (function(*args, **kwargs), "wrapped")


def test_class_static_and_plain_functions_keep_their_kind_and_are_wrapped_once(upstream):
    for name in ("build", "plain", "method") * 2:
        assert hook.wrap(f"lns_fake_upstream:Upstream.{name}", doubled)
    thing = upstream.Upstream()
    assert thing.build(1) == (("Upstream", 1, 2), "wrapped") == upstream.Upstream.build(1)
    assert thing.plain(3) == (3, "wrapped") and thing.method(1) == (2, "wrapped")
    assert thing.build.__doc__ == "What it does." and hook.is_wrapped(upstream.Upstream.__dict__["build"])
    hook.require_wrapped("lns_fake_upstream")


def test_a_missing_function_is_named_where_a_scheme_is_selected_if_it_is_needed(upstream):
    assert not hook.wrap("lns_fake_upstream:Upstream.gone", doubled, needed=False)
    hook.require_wrapped("lns_fake_upstream")
    assert not hook.wrap("lns_fake_upstream:Gone.method", doubled)
    with pytest.raises(
        UpstreamChangedError,
        match="this version of lns_fake_upstream lacks what olmo-lns needs: lns_fake_upstream:Gone.method was not found",
    ):
        hook.require_wrapped("lns_fake_upstream")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``lns_fake_package.part.here`` that nobody has imported."""
    (tmp_path / "lns_fake_package/part").mkdir(parents=True)
    for name in ("__init__", "part/__init__", "part/here"):
        (tmp_path / f"lns_fake_package/{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_needed", "_callbacks"):
        monkeypatch.setattr(hook, name, {})
    yield "lns_fake_package"
    assert not [name for name in sys.modules if name.startswith("lns_fake_package")]


def test_a_needed_module_only_has_to_be_found_and_nothing_is_imported_for_that(package):
    hook.on_import(f"{package}.part.here", print)
    hook.on_import(f"{package}.part.optional", print, needed=False)
    hook.require_wrapped(package, [f"{package}.part"])


@pytest.mark.parametrize("name", ["gone", "gone.here", "part.gone", "part.here.gone"])
def test_a_needed_module_that_was_moved_is_named_where_a_scheme_is_selected(package, name):
    hook.on_import(f"{package}.{name}", print)
    with pytest.raises(UpstreamChangedError, match=f"the module {package}.{name} was not found"):
        hook.require_wrapped(package)
    hook.require_wrapped("lns_other_package")
