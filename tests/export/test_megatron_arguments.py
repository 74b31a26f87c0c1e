"""The exporter reads its arguments as the parser of every supported Megatron saves them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.megatron_saved import RECORDED, names_read, saved_arguments

from olmo_lns.checkpoints.megatron import architecture, gain_shift, load_common
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.settings import ZERO_CENTRED, Settings

VERSIONS = ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20")
#: Case -> the values that the exporter must read from it, where they differ from the first case's.
READ = {
    "base": {},
    "zero_centred": {"shift": 1.0},
    "exponent": {"exponent": 0.25},
    "keep_scaled_init": {"scaled_init": "upstream"},
    "layer_norm": {"layer_norm_type": "default", "bias_for_layer_norm": True},
    "epsilon": {"layer_norm_eps": 1e-6},
    "theta": {"rope_theta": 500_000.0},
    "tied": {"weight_tying": True},
    "gqa": {"n_kv_heads": 2},
    "init_std": {"init_std": 0.01},
}
REFUSED = sorted(set(RECORDED["0.16"]) - set(READ))


def known(cases):
    """(version, case) of the cases whose flag the version has."""
    return [(version, case) for version in VERSIONS for case in cases if RECORDED[version][case] is not None]


def understood(args):
    record = Settings.of(args).record(args)
    found = vars(architecture(args, 128, "saved")) | {"shift": gain_shift(args, "saved")}
    return found | {
        "exponent": record.scheme.parameters["exponent"],
        "scaled_init": record.scaled_init,
        "active": record.active,
    }


def arguments(version, case):
    args = saved_arguments(version, case)
    assert args is not None
    return args


@pytest.mark.parametrize(("version", "case"), known(READ))
def test_saved_arguments_are_understood(version, case):
    expected = understood(arguments(version, "base")) | READ[case]
    assert understood(arguments(version, case)) == expected
    assert expected["active"] and expected["layer_norm_eps"] == READ[case].get("layer_norm_eps", 1e-5)
    assert (expected["d_model"], expected["n_layers"], expected["mlp_hidden_size"]) == (32, 4, 128)


@pytest.mark.parametrize(("version", "case"), known(REFUSED))
def test_an_architecture_that_no_stock_class_computes_is_refused(version, case):
    args = arguments(version, case)
    with pytest.raises(LNSConfigError) as refusal:
        architecture(args, 128, "saved")
    assert any(name in str(refusal.value) for name in RECORDED[version][case])


@pytest.mark.parametrize("version", VERSIONS)
def test_every_argument_that_is_read_is_recorded(version):
    """A newly read argument must be recorded too: another version may give it another name."""
    recorded = {name for found in RECORDED.values() for case in ("base", "gqa") for name in found[case]}
    never_saved = {"layernorm_scaling_folded"}  # written by the exporter itself
    for case in ("base", "gqa"):
        assert names_read(arguments(version, case)) - recorded <= never_saved


def test_an_argument_that_is_missing_under_every_name_is_not_taken_for_its_default():
    args = arguments("0.16", "zero_centred")
    del args.layernorm_zero_centered_gamma
    with pytest.raises(LNSConfigError, match="neither apply_layernorm_1p nor layernorm_zero_centered_gamma"):
        gain_shift(args, "saved")
    del args.layernorm_epsilon
    with pytest.raises(LNSConfigError, match="neither norm_epsilon nor layernorm_epsilon"):
        architecture(args, 128, "saved")


def test_the_installed_core_names_the_argument_as_recorded():
    """From 0.16 on the parser takes an argument's name from the field that declares its flag."""
    config = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    from megatron.core import __version__

    recorded = RECORDED[".".join(__version__.split(".")[:2])]["base"]
    declared = config.__dataclass_fields__["layernorm_zero_centered_gamma"].metadata.get("argparse_meta", {})
    own = "--apply-layernorm-1p" in declared.get("arg_names", ())
    assert ZERO_CENTRED[own] in recorded and ZERO_CENTRED[not own] not in recorded


@pytest.mark.slow
def test_the_checkouts_parser_gives_the_recorded_values(tmp_path):
    """The checkout is MEGATRON_LM_SRC; all that its parser saves is read without running any of its code."""
    if not (source := os.environ.get("MEGATRON_LM_SRC")):
        pytest.skip("MEGATRON_LM_SRC names no Megatron-LM checkout")
    program = Path(__file__).with_name("programs") / "record_megatron_arguments.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), "--save", str(tmp_path / "common.pt")],
        capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MEGATRON_LM_SRC": source},
    )  # fmt: skip
    if "No module named 'triton'" in done.stderr:
        pytest.skip("this Megatron-LM imports triton, which is not installed")
    assert done.returncode == 0, done.stderr[-3000:]
    ((version, found),) = json.loads(done.stdout.splitlines()[-1]).items()
    assert found == RECORDED[version]
    assert understood(load_common(tmp_path / "common.pt")["args"]) == understood(arguments(version, "base"))
