"""Versions of OLMo that were not verified."""

import sys

import pytest
from support import launch

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations.olmo import upstream


def test_an_olmo_that_is_too_old_is_refused_and_a_newer_version_is_not():
    with pytest.raises(UpstreamChangedError, match=r"ai2-olmo 0\.3\.0: .*needs at least 0\.4\.0"):
        upstream.check_version("0.3.0")
    upstream.check_version("0.7.0")


# An OLMo whose code was not verified gives an error, not a wrong model

#: Name -> file, text, its replacement, and words of the error.
CHANGES = {
    "signature": (
        "model.py",
        "def __init__(self, layer_id: int, config: ModelConfig, cache: BufferCache):",
        "def __init__(self, layer_id: int, config: ModelConfig, cache: BufferCache, *, tag: str = ''):",
        "olmo.model:OLMoSequentialBlock.__init__ in ",
    ),
    "trainer": (  # `import olmo` does not load it
        "train.py",
        "trainer_state_dict(",
        "state_of_trainer(",
        "olmo.train:Trainer.trainer_state_dict does not exist",
    ),
}
BUILD = """
import sys
from olmo_lns.integrations import autoload
autoload.activate()
import olmo.train
from olmo.config import LayerNormType, ModelConfig
from olmo.model import OLMo
config = ModelConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=16, embedding_size=16, max_sequence_length=8)
config.layer_norm_type = LayerNormType[sys.argv[1]]
print(olmo.__path__[0], [getattr(block.attn_norm, "lns_scale", None) for block in OLMo(config).transformer.blocks])
"""
#: Starts the error where a scheme was asked for.
REFUSED = "A scheme was asked for, but this OLMo was left untouched: "


@pytest.fixture(scope="module", params=CHANGES)
def changed(request, tmp_path_factory):
    file, old, new, said = CHANGES[request.param]
    tree = launch.copy_of_olmo(tmp_path_factory.mktemp("changed"))
    text = (tree / "olmo" / file).read_text()
    assert old in text
    (tree / "olmo" / file).write_text(text.replace(old, new))

    def build(kind, **variables):
        env = launch.environment(PYTHONPATH=f"{tree}:{launch.REPOSITORY}", **variables)
        return launch.run([sys.executable, "-c", BUILD, kind], cwd=tree, env=env)

    return request.param, said, build, f"{tree}/olmo [None, None]"


@pytest.mark.slow
def test_an_unverified_olmo_is_refused_only_where_a_scheme_or_an_initialization_is_asked_for(changed):
    name, said, build, untouched = changed
    alone = build("rms", OLMO_LNS_DISABLE="1").ok()  # it must work by itself, or the errors would show nothing
    stock = build("rms", OLMO_LNS_SCHEME="lns:exponent=0.25").ok()  # this variable selects no scheme
    assert alone.last_line() == stock.last_line() == untouched and "untouched" not in alone.text
    assert stock.text.count("leaves this OLMo untouched") == 1 and said in stock.text
    for refused in (build("lns_rms"), build("rms", OLMO_LNS_INITIALIZATION="plain")):  # the second is a stock model
        assert refused.code != 0 and REFUSED in refused.text and said in refused.text
    # Nothing can be allowed where the function does not exist.
    assert ("OLMO_LNS_ALLOW_UNVERIFIED=1" in refused.text) == (name == "signature")
    allowed = build("lns_rms", OLMO_LNS_ALLOW_UNVERIFIED="1")
    if name == "signature":
        assert "0d09c77bc4f5c8f4" in refused.text, "the verified fingerprint is not named"
        assert "Going on because OLMO_LNS_ALLOW_UNVERIFIED=1" in allowed.text
        assert allowed.ok().last_line().endswith(f"{[1.0, 2**-0.5]}")
    else:
        assert allowed.code != 0 and REFUSED in allowed.text
