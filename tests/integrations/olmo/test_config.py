"""Selecting a scheme in OLMo: the config, overrides and variables, and what is refused."""

import copy
import pickle
from dataclasses import dataclass

import pytest
from olmo.config import LayerNormType, ModelConfig, TrainConfig
from olmo.exceptions import OLMoConfigurationError
from omegaconf import OmegaConf
from support import forked

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
        (None, "lns", "lns_default"),  # a config without a type has OLMo's default
        ("lns_default", "lns", "lns_default"),
        ("lns", None, "lns_rms"),
        ("rms", "lns_default", "lns_default"),
        ("lns_rms", "rms", "rms"),
        ("lns:exponent=0.25", None, "lns_rms:exponent=0.25"),
        ("default", "lns:exponent=0.25", "lns_default:exponent=0.25"),
        ("rms", "lns_rms:exponent=2.5e-1", "lns_rms:exponent=0.25"),
        ("lns_rms:exponent=0.5", None, "lns_rms"),
    ],
)
def test_the_resolved_type_is_written_into_the_config(tmp_path, caplog, named, override, resolved):
    overrides = [f"model.layer_norm_type={override}"] if override else None
    with caplog.at_level("INFO", logger="olmo_lns"):
        config = TrainConfig.load(write(tmp_path, named), overrides)
    assert config.model.layer_norm_type is LayerNormType[resolved] is LayerNormType(resolved)
    requested = override or named or "default"
    assert caplog.text.count("layer_norm_type=") == (requested not in ("rms", "default", resolved))
    model = ModelConfig.load(tmp_path / "config.yaml", override and [f"layer_norm_type={override}"], key="model")
    assert model.layer_norm_type is LayerNormType[resolved]
    config.save(tmp_path / "saved.yaml")
    assert f"layer_norm_type: {resolved}\n" in (tmp_path / "saved.yaml").read_text()
    assert TrainConfig.load(tmp_path / "saved.yaml").model.layer_norm_type is LayerNormType[resolved]


@dataclass
class OwnConfig(TrainConfig):
    """The config of a training script that adds settings to OLMo's."""

    comment: str = ""


def test_a_bare_scheme_keeps_the_base_norm_in_a_config_class_of_ones_own(tmp_path):
    config = OwnConfig.load(write(tmp_path, "default"), ["model.layer_norm_type=lns"])
    assert config.model.layer_norm_type is LayerNormType["lns_default"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("xyz", "Invalid value 'xyz', expected one of [default, low_precision, rms, lns, lns_rms"),
        ("lns:exponant=0.25", "no parameter 'exponant' (did you mean 'exponent'?)"),
        ("rms:exponent=0.25", "Invalid value 'rms:exponent=0.25'"),
    ],
)
@pytest.mark.parametrize("on_command_line", [True, False])
def test_a_wrong_type_is_refused(tmp_path, wrong, message, on_command_line):
    path = write(tmp_path, "rms" if on_command_line else wrong)
    with pytest.raises(OLMoConfigurationError) as caught:
        TrainConfig.load(path, [f"model.layer_norm_type={wrong}"] if on_command_line else None)
    assert message in str(caught.value)


def test_a_misspelt_type_on_the_command_line_gets_a_hint(tmp_path):
    with pytest.raises(OLMoConfigurationError, match=r"did you mean 'lns_rms'\?"):
        TrainConfig.load(write(tmp_path, "rms"), ["model.layer_norm_type=lns_rsm"])


def test_a_type_with_parameters_is_a_full_member_of_the_enum():
    name = "lns_rms:exponent=0.37"
    member = LayerNormType[name]
    register()
    assert [str(m) for m in LayerNormType].count("lns") == 1 and LayerNormType("lns") is LayerNormType.lns
    assert member is LayerNormType(name) is getattr(LayerNormType, name) is LayerNormType.__members__[name]
    assert isinstance(member, LayerNormType) and (member.name, member.value, str(member)) == (name, name, name)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is copy.deepcopy(member) is copy.copy(member) is member
    config = OmegaConf.merge(OmegaConf.structured(ModelConfig), {"layer_norm_type": "lns_rms:exponent=0.31"})
    assert OmegaConf.to_object(config).layer_norm_type is LayerNormType("lns_rms:exponent=0.31")


NEW_PROCESS = """
import sys
from olmo.config import LayerNormType, TrainConfig
for path in sys.argv[1:]:
    try:
        model = TrainConfig.load(path).model
        print(model.layer_norm_type is LayerNormType(model.layer_norm_type.value), model.init_fn)
    except Exception as error:
        print(error)
"""


def test_a_saved_config_loads_in_a_new_process_and_is_refused_by_stock_olmo(tmp_path):
    """The new process has never seen the type. Stock OLMo must not train another model from this package's files."""
    saved = []
    for kind, init_fn in (("lns_default:exponent=0.29", "normal"), ("rms", "normal_scaled")):
        saved.append(tmp_path / f"{init_fn}.yaml")
        TrainConfig.load(write(tmp_path, kind), [f"model.init_fn={init_fn}"]).save(saved[-1])
    ours = forked.run(NEW_PROCESS, *saved, OLMO_LNS_DISABLE="0")
    assert ours.stdout == "True normal\nTrue normal_scaled\n", ours.stderr
    stock = forked.run(NEW_PROCESS, *saved, OLMO_LNS_DISABLE="1").stdout
    assert "Invalid value 'lns_default:exponent=0.29', expected one of" in stock
    assert "Invalid value 'normal_scaled', expected one of" in stock
