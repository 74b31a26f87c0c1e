"""Selecting a scheme by flags, in Python or in JSON, and the mistakes that must be an error."""

import copy
import json
import os
import sys

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

from olmo_core.nn.transformer import TransformerConfig
from support import launch
from support import olmo_core_models as small

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.olmo_core import BlockConfig, apply

CLASS_OVERRIDE = "--block._CLASS_=olmo_lns.olmo_core.BlockConfig"


def test_flags_of_an_unmodified_launch_select_the_scheme():
    config = small.config().merge([CLASS_OVERRIDE, "--block.scheme=lns", "--block.exponent=0.25"])
    assert type(config.block) is BlockConfig and str(config.block.resolved_scheme) == "lns:exponent=0.25"
    assert config.block.stock() == small.config().block
    block = small.config().merge([CLASS_OVERRIDE]).block
    assert (block.scheme, block.exponent, block.initialization) == ("lns", 0.5, "plain")
    block = small.config().merge([CLASS_OVERRIDE, "--block.scheme=lns:exponent=0.25"]).block
    assert (block.scheme, block.exponent) == ("lns", 0.25)
    for spelled, given in (("0.25", "1"), ("0.5", "0.25")):  # 0.5 is the default, which a scheme's name leaves out
        with pytest.raises(Exception, match="contradict"):
            small.config().merge(
                [CLASS_OVERRIDE, f"--block.scheme=lns:exponent={spelled}", f"--block.exponent={given}"]
            )
    same = small.config().merge([CLASS_OVERRIDE, "--block.scheme=lns:exponent=0.5", "--block.exponent=0.5"])
    assert same.block.exponent == 0.5


def test_a_built_model_is_refused_since_its_checkpoints_would_not_name_the_scheme():
    model = small.config().build()
    with pytest.raises(LNSConfigError, match=r"olmo_lns\.olmo_core\.apply\(config, \"lns\"\), then config\.build"):
        olmo_lns.apply(model)
    assert not any(sites.in_model(model))
    under = apply(small.config(), "lns").build()
    assert olmo_lns.apply(under) is under  # it is measured again


@pytest.mark.parametrize("name", ["olmo_lns.BlockConfig", "olmo_lns.olmo_core.BlokConfig"])
def test_a_wrong_class_name_of_olmo_lns_is_refused_wherever_it_is_written(name):
    """OLMo-core silently takes its own block where a module has no such class."""
    values = small.config().as_config_dict()
    overridden = values | {"block_overrides": {"1": values["block"] | {"_CLASS_": name}}}
    for make in (
        lambda: small.config().merge([f"--block._CLASS_={name}"]),
        lambda: TransformerConfig.from_dict(values, overrides=[f"block._CLASS_={name}"]),
        lambda: TransformerConfig.from_dict(overridden),
    ):
        with pytest.raises(LNSConfigError, match="The block config is olmo_lns.olmo_core.BlockConfig"):
            make()


@pytest.mark.parametrize(
    ("block", "fields", "message"),
    [
        ("default", {"scheme": "lsn"}, "Unknown scheme 'lsn' .did you mean 'lns'"),
        ("default", {"scheme": "preln"}, "scheme=preln is OLMo-core's own block"),
        ("default", {"initialization": "scaled"}, "block.initialization is .scaled.. Expected plain or upstream"),
        (
            "default",
            {"scheme": "branchln_depth"},
            "does more than multiply the norms of block.name=default. .* as lns,",
        ),
        ("reordered_norm", {"scheme": "lns"}, "such as branchln_depth .not the method of the"),
        ("peri_norm", {"scheme": "lns"}, "peri_norm does not support schemes"),
        ("default_scaled", {"scheme": "lns"}, "default_scaled does not support schemes"),
        ("normalized", {"scheme": "lns"}, "normalized does not support schemes"),
    ],
)
def test_a_block_config_that_cannot_be_built_is_refused(block, fields, message):
    config = small.config()
    config.block.name = type(config.block.name)(block)
    with pytest.raises(LNSConfigError, match=message):
        apply(copy.deepcopy(config), **fields)
    with pytest.raises(Exception, match=message):
        config.block = BlockConfig(**vars(config.block), **fields)
        config.build(init_device="meta")


def test_apply_changes_a_model_config_or_its_holder_in_place():
    config = small.config()
    assert apply(config, exponent=0.25) is config
    assert config.block.exponent == 0.25

    class Experiment:
        model = small.config()

    assert type(apply(Experiment).model.block) is BlockConfig
    with pytest.raises(LNSConfigError, match="a block config of class BlockConfig"):
        apply(config)
    with pytest.raises(LNSConfigError, match="It needs OLMo-core's TransformerConfig"):
        apply(config.block)


def _patterned(block, **names):
    config = small.config()
    common = dict(d_model=config.d_model, vocab_size=config.vocab_size, n_layers=5, lm_head=config.lm_head)
    return TransformerConfig(**common, block={"wide": block, **names}, block_pattern=["wide", *names])


def test_block_overrides_and_named_blocks_get_the_factor_of_their_own_number():
    overridden, other = small.config(), copy.deepcopy(small.config().block)
    other.feed_forward.hidden_size = 16
    overridden.block_overrides = {2: other}
    for config in (overridden, _patterned(small.config().block, narrow=other)):
        assert apply(copy.deepcopy(config)).num_params == config.num_params
        scales = [block.feed_forward_norm.lns_scale for block in small.model(apply(config), seed=None).blocks.values()]
        assert scales == [number**-0.5 for number in range(1, config.n_layers + 1)]


@pytest.mark.parametrize("missing", [0, small.LAYERS - 1])
def test_blocks_without_the_scheme_or_with_another_are_refused_before_training(missing):
    config, other = small.config(), apply(small.config()).block
    config.block_overrides = {missing: copy.deepcopy(config.block)}
    with pytest.raises(LNSConfigError, match=rf"blocks \[{missing}\] of 4 .counted from 0. are OLMo-core's own"):
        small.model(config.merge([CLASS_OVERRIDE]))
    with pytest.raises(LNSConfigError, match=r"blocks \[1, 3\] of 5"):
        small.model(_patterned(copy.deepcopy(other), narrow=small.config().block))
    config, other.exponent = apply(small.config()), 0.25
    config.block_overrides = {missing: other}
    with pytest.raises(LNSConfigError, match="The model has the schemes"):
        small.model(config)


_LOAD = """
import json, sys
from olmo_lns import hook
from olmo_core.train.checkpoint import Checkpointer
before = hook and (hook.autoload_active(), hook.is_wrapped(Checkpointer.load))
from olmo_core.nn.transformer import TransformerConfig
config = TransformerConfig.from_dict(json.load(open(sys.argv[1])))
print(*before, hook.is_wrapped(Checkpointer.load), type(config.block).__name__, config.block.scheme, config.block.exponent)
"""


def test_a_json_config_loads_in_another_process_without_the_start_up_hook_and_fails_without_the_package(tmp_path):
    """Naming the class wraps the checkpointer's load."""
    config = apply(small.config(), exponent=0.25)
    (path := tmp_path / "config.json").write_text(json.dumps(config.as_config_dict()))
    assert TransformerConfig.from_dict(json.loads(path.read_text())) == config
    packages = [path for path in sys.path if path.endswith("site-packages")]
    env = launch.environment(PYTHONPATH=os.pathsep.join([str(launch.REPOSITORY), *packages]))
    there = launch.run([sys.executable, "-S", "-c", _LOAD, path], cwd=tmp_path, env=env)
    assert there.last_line() == "False False True BlockConfig lns 0.25", there.text
    gone = _LOAD.replace("from olmo_lns import hook", "sys.modules['olmo_lns'] = hook = None")
    without = launch.run([sys.executable, "-c", gone, path], cwd=tmp_path)
    assert without.code and "olmo_lns" in without.last_line()


def test_a_config_with_a_scheme_is_refused_when_the_plugin_is_disabled(monkeypatch):
    config = apply(small.config())
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    for build in (config.build, lambda init_device: config.block.build(d_model=32, block_idx=0, n_layers=2)):
        with pytest.raises(LNSConfigError, match="OLMO_LNS_DISABLE=1 is set, but a block config names a scheme"):
            build(init_device="meta")
    small.config().build(init_device="meta")


def test_what_an_olmo_core_lacks_is_an_error_once_a_scheme_is_selected(monkeypatch):
    from olmo_lns import hook
    from olmo_lns.errors import UpstreamChangedError

    config = apply(small.config())
    monkeypatch.setitem(hook._problems, "olmo_core", ["olmo_core.train.checkpoint:Checkpointer.load was not found"])
    small.config().build(init_device="meta")
    with pytest.raises(UpstreamChangedError, match=r"olmo_core.train.checkpoint:Checkpointer.load was not found"):
        config.build(init_device="meta")


def test_the_module_that_loads_checkpoints_must_be_there_once_a_scheme_is_selected(monkeypatch):
    from olmo_lns.errors import UpstreamChangedError

    config = apply(small.config())
    monkeypatch.setitem(sys.modules, "olmo_core.train.checkpoint", None)  # Python then finds no such module
    small.config().build(init_device="meta")
    with pytest.raises(UpstreamChangedError, match=r"the module olmo_core.train.checkpoint was not found"):
        config.build(init_device="meta")
