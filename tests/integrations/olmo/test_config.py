from __future__ import annotations

import pytest
from olmo.config import LayerNormType, ModelConfig, TrainConfig
from olmo.exceptions import OLMoConfigurationError

from olmo_lns.integrations.olmo import register

register()


def write(tmp_path, named):
    path = tmp_path / "config.yaml"
    line = f"  layer_norm_type: {named}\n" if named else ""
    path.write_text(f"run_name: x\nmodel:\n  d_model: 64\n  n_heads: 4\n{line}")
    return path


@pytest.mark.parametrize(
    ("named", "override", "resolved"),
    [
        ("rms", "lns", "lns_rms"),
        ("default", "lns", "lns_default"),
        ("low_precision", "lns", "lns_low_precision"),
        (None, "lns", "lns_default"),  # OLMo's own default is what the config means
        ("lns", "lns", "lns_rms"),
        ("lns_default", "lns", "lns_default"),
        ("lns", None, "lns_rms"),
        ("lns_default", None, "lns_default"),
        ("rms", "lns_default", "lns_default"),
        ("lns_rms", "rms", "rms"),
        ("rms", None, "rms"),
        (None, None, "default"),
    ],
)
def test_resolution(tmp_path, caplog, named, override, resolved):
    overrides = [f"model.layer_norm_type={override}"] if override else None
    with caplog.at_level("INFO", logger="olmo_lns"):
        config = TrainConfig.load(write(tmp_path, named), overrides)
    assert config.model.layer_norm_type is LayerNormType[resolved]
    assert caplog.text.count("layer_norm_type=lns") == ("lns" in (named, override) and override != "rms") * (
        (override or named) == "lns"
    )
    config.save(tmp_path / "saved.yaml")
    assert f"layer_norm_type: {resolved}\n" in (tmp_path / "saved.yaml").read_text()
    assert TrainConfig.load(tmp_path / "saved.yaml").model.layer_norm_type is LayerNormType[resolved]


def test_model_config_by_key_as_from_checkpoint_loads_it(tmp_path):
    config = ModelConfig.load(write(tmp_path, "lns"), key="model", validate_paths=False)
    assert config.layer_norm_type is LayerNormType.lns_rms


def test_interpolations_elsewhere_are_not_touched_by_reading_the_type(tmp_path):
    path = write(tmp_path, "rms")
    path.write_text(path.read_text() + "save_folder: ${oc.env:LNS_TEST_UNSET_VARIABLE}\n")
    with pytest.raises(OLMoConfigurationError, match="LNS_TEST_UNSET_VARIABLE"):
        TrainConfig.load(path, ["model.layer_norm_type=lns"])
    config = TrainConfig.load(path, ["model.layer_norm_type=lns", "save_folder=here"])
    assert config.model.layer_norm_type is LayerNormType.lns_rms


@pytest.mark.parametrize(("wrong", "nearest"), [("lns_rsm", "lns_rms"), ("lsn", "lns"), ("deflaut", "default")])
@pytest.mark.parametrize("on_command_line", [True, False])
def test_unknown_types_are_named_with_the_nearest(tmp_path, wrong, nearest, on_command_line):
    path = write(tmp_path, "rms" if on_command_line else wrong)
    overrides = [f"model.layer_norm_type={wrong}"] if on_command_line else None
    with pytest.raises(OLMoConfigurationError) as caught:
        TrainConfig.load(path, overrides)
    assert f"unknown layer_norm_type '{wrong}'. Did you mean '{nearest}'? Known: default" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_norm_after_is_refused_when_the_config_is_loaded(tmp_path):
    with pytest.raises(OLMoConfigurationError, match="norm_after=true: LayerNorm Scaling is a Pre-LN method"):
        TrainConfig.load(write(tmp_path, "rms"), ["model.layer_norm_type=lns", "model.norm_after=true"])
