"""Which versions of Megatron are verified, and what happens with another one."""

import importlib.util
import inspect
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
from support import megatron_launch
from support import megatron_tiny as tiny

from olmo_lns import plain_initialization
from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import patching
from olmo_lns.integrations.megatron import apply, building, checkpoint, layer_spec, register, registration, upstream
from olmo_lns.integrations.patching import fingerprint, is_patched
from olmo_lns.record import Record
from olmo_lns.schemes import LNS

TABLE = {target.path: target for target in upstream.TARGETS}
#: Missing in some versions: the stack of hybrid models and the config have moved, vit_model and the steps are new in main.
MAY_MISS = (
    *("MambaStack.__init__", "HybridStack.__init__", "core_transformer_config_from_args", "ViTModel.__init__"),
    *("._forward_post_mlp", "_bda_step"),
)


def test_the_installed_core_is_verified_symbol_by_symbol_in_memory_and_in_its_files():
    import megatron.core
    from megatron.core.extensions.transformer_engine import HAVE_TE

    tree, found = Path(inspect.getfile(megatron.core)).parents[2], 0
    version = megatron.core.__version__.replace("0.20.0", "main")
    for path, target in TABLE.items():
        fused = path.endswith("TELayerNormColumnParallelLinear.forward") and not HAVE_TE  # then an empty class
        versions = ", ".join(target.verified.values()).split(", ")
        if path.startswith("megatron.core.") and version in versions and not fused:
            function = target.locate()[2]
            assert version in target.verified[fingerprint(function)].split(", "), path
            text = patching.source_below(tree, path)
            assert text is not None and patching.digest(text) == fingerprint(function), path
            found += 1
    assert found >= 13, f"megatron-core {version} is not in the table"


def test_the_checkout_is_verified():
    tree = megatron_launch.checkout()
    texts = {path: patching.source_below(tree, path) for path in TABLE}
    found = {path: TABLE[path].verified.get(patching.digest(text), "unknown") for path, text in texts.items() if text}
    assert all(path.endswith(MAY_MISS) for path in set(TABLE) - set(found)), set(TABLE) - set(found)
    assert set.intersection(*(set(versions.split(", ")) for versions in found.values())), found


def test_register_replaces_a_function_once_and_refuses_to_come_after_megatrons_arguments(monkeypatch):
    from megatron.core.transformer.transformer_layer import TransformerLayer

    before = TransformerLayer.__init__
    register()
    assert TransformerLayer.__init__ is before and is_patched(before) and not is_patched(before.__wrapped__)
    name = "megatron.training.arguments"
    monkeypatch.setattr(registration, "_installed", registration._installed - {name})
    late = ModuleType(name)
    late.__spec__ = importlib.util.spec_from_loader(name, None)
    monkeypatch.setitem(sys.modules, name, late)
    with pytest.raises(LNSConfigError, match="came after the import of megatron.training.arguments"):
        register()


@pytest.fixture
def unknown(monkeypatch):
    """Megatron's module of layers with an unverified class, as if it were imported for the first time."""
    from megatron.core.transformer import transformer_layer

    class TransformerLayer:
        def __init__(self, config):
            self.config = config

        def sharded_state_dict(self): ...

    monkeypatch.setattr(transformer_layer, "TransformerLayer", TransformerLayer)
    monkeypatch.setattr(patching, "_aside", {})
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    return transformer_layer


def test_an_unknown_megatron_is_left_untouched_with_one_warning(unknown, caplog, monkeypatch):
    from megatron.core.transformer import transformer_block

    init = unknown.TransformerLayer.__init__
    monkeypatch.delattr(transformer_block, "TransformerBlock")
    for module in (transformer_block, unknown, unknown):
        registration._extend(module)
    assert unknown.TransformerLayer.__init__ is init
    (warning,) = caplog.records
    assert "leaves this Megatron Core untouched" in warning.getMessage()
    assert "TransformerBlock.__init__ does not exist" in caplog.text
    monkeypatch.setenv(patching.ALLOW_UNVERIFIED, "1")
    registration._extend(unknown)
    assert is_patched(unknown.TransformerLayer.__init__)


@pytest.mark.parametrize("word", ["--layernorm-scaling", "--norm-scheme=sandwich", "--no-scaled-init"])
def test_an_unknown_megatron_is_refused_where_a_flag_asks_for_a_scheme(unknown, monkeypatch, word):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", word])
    with pytest.raises(UpstreamChangedError) as caught:
        registration._extend(unknown)
    message = str(caught.value)
    assert "transformer_layer:TransformerLayer.__init__" in message and "0.16.1" in message
    assert "OLMO_LNS_ALLOW_UNVERIFIED=1" in message and "OLMO_LNS_DISABLE=1" in message


def test_an_unknown_megatron_is_refused_where_a_scheme_is_asked_for_later(unknown, monkeypatch):
    """``apply``, a config, the arguments of a checkpoint or its record asks for one. The loaders are only watched."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization

    for name in ("load", "save"):  # so that monkeypatch restores what the tested code sets
        monkeypatch.setattr(dist_checkpointing, name, getattr(dist_checkpointing, name))
    saved = {"args": Namespace(tensor_parallel=1)}
    monkeypatch.setattr(serialization, "load", lambda state, folder: saved)
    monkeypatch.setattr(serialization, "save", lambda state, folder: None)
    registration._extend(unknown)
    registration._extend(serialization)
    assert not is_patched(serialization.save)
    assert dist_checkpointing.load({}, "folder") is saved
    record = {"content_metadata": {"olmo_lns": Record(LNS).as_dict()}}
    for ask in (
        lambda: apply(tiny.config()),
        lambda: plain_initialization(tiny.config()),
        lambda: building.config_from_args(lambda args, kind=None: None)(Namespace(layernorm_scaling=True)),
        lambda: checkpoint.look(lambda: (object(), Namespace(norm_scheme="lnsafterff")))(),
        lambda: saved.update(record, args=None) or dist_checkpointing.load({}, "folder"),
    ):
        with pytest.raises(UpstreamChangedError, match=r"this Megatron Core was left untouched.*OLMO_LNS_DISABLE=1"):
            ask()
    # A layer spec needs only the layer's constructor, even where the plugin is off.
    with pytest.raises(UpstreamChangedError, match=r"TransformerLayer.__init__ .*none of those verified"):
        layer_spec(tiny.config(), tiny.local_spec)


def test_a_bridge_that_lacks_a_function_is_refused_where_a_scheme_is_built(monkeypatch):
    monkeypatch.setattr(patching, "_aside", {})
    name = "megatron.bridge.training.mlm_compat.arguments"
    for part in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.mlm_compat", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    registration._extend(sys.modules[name])
    apply(cfg := tiny.config())
    words = r"this Megatron Bridge was left untouched.*_transformer_config_from"
    with pytest.raises(UpstreamChangedError, match=words):
        tiny.build(cfg)
