"""The guards: which Megatron is known, and what happens with another one."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import patching, sources
from olmo_lns.integrations.megatron import apply, checkpoint, launching, register, upstream
from olmo_lns.integrations.patching import Target, fingerprint, is_patched
from olmo_lns.record import Record
from olmo_lns.schemes import LNS

ROOT = Path(__file__).parents[3]
VIT = {"VIT", "QWEN_VIT", "KIMI_VIT"}
STEPS = {"POST_MLP", "ATTENTION_STEP", "MLP_STEP"}
TABLE = {name: target for name, target in vars(upstream).items() if isinstance(target, Target)}


def test_every_target_is_in_the_tuple_and_is_used() -> None:
    paths = [target.path for target in upstream.TARGETS]
    assert sorted(target.path for target in TABLE.values()) == sorted(paths)
    only_read = {target.path for target in (upstream.FUSED, *upstream.ADDITIONS, *upstream.ADDITION_STEPS)}
    assert [target.path for target, _ in upstream._pairs()] == [path for path in paths if path not in only_read]


def core_targets() -> dict[str, Target]:
    """Targets in ``megatron.core`` that the installed version has according to the table."""
    from megatron.core import __version__ as version
    from megatron.core.extensions.transformer_engine import HAVE_TE

    found = {
        name: target
        for name, target in TABLE.items()
        if target.path.startswith("megatron.core.")
        and (name != "FUSED" or HAVE_TE)  # without TE the class is an empty one; test_te.py has TE
        and any(version in versions.split(", ") for versions in target.verified.values())
    }
    assert len(found) >= 4, f"megatron-core {version} is not in the table"
    return found


def test_the_installed_core_is_verified_symbol_by_symbol() -> None:
    import megatron.core

    for name, target in core_targets().items():
        owner, attribute = target.locate()
        function = inspect.getattr_static(owner, attribute)
        assert megatron.core.__version__ in target.verified[fingerprint(function)].split(", "), name


def test_fingerprints_read_from_files_are_those_of_the_imported_functions() -> None:
    import megatron.core

    tree = Path(inspect.getfile(megatron.core)).parents[2]
    for name, target in core_targets().items():
        owner, attribute = target.locate()
        text = sources.read(tree, target.path)
        assert sources.digest(text) == fingerprint(inspect.getattr_static(owner, attribute)), name


def test_every_version_has_every_symbol_once() -> None:
    # vit_model is new in main; post_training is not in wheels, of which 0.19.2 is one.
    may_miss = {"MAMBA_STACK", "HYBRID_STACK", "CONFIG", "CONFIG_UNTIL_0_17", "LOAD_MODELOPT", *VIT, *STEPS}
    for name, target in TABLE.items():
        versions = [v for text in target.verified.values() for v in text.split(", ")]
        assert len(versions) == len(set(versions))
        assert set(versions) <= set(upstream.VERSIONS)
        if name not in may_miss:
            assert set(versions) == set(upstream.VERSIONS), name
    for one, other in (("MAMBA_STACK", "HYBRID_STACK"), ("CONFIG", "CONFIG_UNTIL_0_17")):
        both = [v for key in (one, other) for t in TABLE[key].verified.values() for v in t.split(", ")]
        assert sorted(both) == sorted(upstream.VERSIONS)


def test_the_checkout_is_verified() -> None:
    if not (tree := os.environ.get("MEGATRON_LM_SRC")):
        pytest.skip("MEGATRON_LM_SRC names no Megatron-LM checkout")
    found = {}
    for name, target in TABLE.items():
        text = sources.read(Path(tree), target.path)
        if text is not None:
            found[name] = target.verified.get(sources.digest(text), "unknown")
    assert set(TABLE) - set(found) <= {"MAMBA_STACK", "HYBRID_STACK", "CONFIG", "CONFIG_UNTIL_0_17", *VIT, *STEPS}
    common = set.intersection(*(set(versions.split(", ")) for versions in found.values()))
    assert common, found


def test_registered_once_and_replaced_once() -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    before = TransformerLayer.__init__
    assert is_patched(before)
    register()
    assert TransformerLayer.__init__ is before
    assert not is_patched(before.__wrapped__)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Megatron's module of layers with a class that nobody verified, imported for the first time."""
    from megatron.core.transformer import transformer_layer

    class TransformerLayer:
        def __init__(self, config: object) -> None:
            self.config = config

        def sharded_state_dict(self) -> None: ...

    monkeypatch.setattr(transformer_layer, "TransformerLayer", TransformerLayer)
    monkeypatch.setattr(patching, "_aside", {})
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    return transformer_layer


def test_an_unknown_megatron_is_left_untouched_with_one_warning(
    unknown: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = unknown.TransformerLayer.__init__
    for _ in range(2):
        upstream._extend(unknown)
    assert unknown.TransformerLayer.__init__ is init
    (warning,) = caplog.records
    assert "leaves this Megatron Core untouched" in warning.getMessage()
    monkeypatch.setenv(patching.ALLOW_UNVERIFIED, "1")
    upstream._extend(unknown)
    assert is_patched(unknown.TransformerLayer.__init__)


@pytest.mark.parametrize("word", ["--layernorm-scaling", "--norm-scheme=sandwich", "--no-scaled-init"])
def test_an_unknown_megatron_is_refused_where_a_flag_asks_for_a_scheme(
    unknown: ModuleType, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", word])
    with pytest.raises(UpstreamChangedError) as caught:
        upstream._extend(unknown)
    message = str(caught.value)
    assert "transformer_layer:TransformerLayer.__init__" in message and "0.16.1" in message
    assert "OLMO_LNS_ALLOW_UNVERIFIED=1" in message and "OLMO_LNS_DISABLE=1" in message


def test_an_unknown_megatron_is_refused_where_a_scheme_comes_later(unknown: ModuleType) -> None:
    """By apply, by the arguments of a checkpoint, or by the record in one."""
    from megatron.core.dist_checkpointing import serialization

    upstream._extend(unknown)
    for ask in (
        lambda: apply(tiny.config()),
        lambda: apply(tiny.config()),
        lambda: launching.config_from_args(lambda args, kind=None: None)(Namespace(layernorm_scaling=True)),
        lambda: checkpoint.look(lambda: (object(), Namespace(norm_scheme="lnsafterff")))(),
        lambda: checkpoint.look(lambda: {"content_metadata": {"olmo_lns": Record(LNS).as_dict()}})(),
    ):
        with pytest.raises(UpstreamChangedError, match=r"this Megatron Core was left untouched.*OLMO_LNS_DISABLE=1"):
            ask()
    assert checkpoint.look(lambda: ({"args": Namespace(tensor_parallel=1)}, 2))()[1] == 2
    assert is_patched(serialization.load)


def test_the_loaders_of_an_unknown_megatron_are_only_looked_at(
    unknown: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    for name in ("load", "save"):  # set anew by what is tested
        monkeypatch.setattr(dist_checkpointing, name, getattr(dist_checkpointing, name))
    monkeypatch.setattr(serialization, "load", lambda state, folder: {"args": Namespace(layernorm_scaling=True)})
    monkeypatch.setattr(serialization, "save", lambda state, folder: None)
    upstream._extend(serialization)
    assert not is_patched(serialization.save)
    with pytest.raises(UpstreamChangedError, match="this Megatron Core was left untouched"):
        serialization.load({}, "folder")


def test_a_missing_symbol_is_no_reason_to_stop(
    unknown: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.transformer import transformer_block

    monkeypatch.delattr(transformer_block, "TransformerBlock")
    upstream._extend(transformer_block)
    assert "TransformerBlock.__init__ does not exist" in caplog.text


def test_registration_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.training.arguments"
    monkeypatch.setattr(upstream, "_installed", upstream._installed - {name})
    late = ModuleType(name)
    late.__spec__ = importlib.util.spec_from_loader(name, None)
    monkeypatch.setitem(sys.modules, name, late)
    with pytest.raises(LNSConfigError, match="came after the import of megatron.training.arguments"):
        register()


def test_import_of_the_package_loads_no_framework() -> None:
    code = (
        "import sys; import olmo_lns.integrations.megatron as m; m.register(); "
        "print([n for n in ('torch', 'megatron') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
