"""docs/own-scheme.md: a scheme of another package, found by its entry point."""

import re
from pathlib import Path

import pytest
from support import forked

pytest.importorskip("olmo.model", reason="needs ai2-olmo")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-scheme.md"
LAUNCH = """
from olmo.config import ModelConfig
from olmo.model import OLMo

sizes = dict(n_layers=4, d_model=16, n_heads=2, vocab_size=32, embedding_size=128, max_sequence_length=8)
model = OLMo(ModelConfig(layer_norm_type="split_rms:attn=0.25", include_bias=False, **sizes))
print([round(getattr(block, name).lns_scale, 6) for block in model.transformer.blocks for name in ("attn_norm", "ff_norm")])
"""


@pytest.fixture
def package(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_schemes.py").write_text(code)
    about = tmp_path / "my_schemes-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-schemes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[olmo_lns.schemes]\nmy_schemes = my_schemes\n")
    return tmp_path


def test_a_scheme_of_another_package_is_a_type_of_an_unmodified_launch(package):
    done = forked.run(LAUNCH, path=package)
    expected = [round(number**-exponent, 6) for number in range(1, 5) for exponent in (0.25, 0.5)]
    assert done.stdout.strip() == str(expected), done.stderr
    assert "s = 1 (block 1) to 0.7071 (block 4), attn; s = 1 (block 1) to 0.5 (block 4), ff" in done.stderr


def test_an_entry_point_that_fails_is_named(package):
    (package / "my_schemes.py").write_text("1 / 0\n")
    done = forked.run(LAUNCH, path=package)
    assert done.returncode and "entry point 'my_schemes' of the group olmo_lns.schemes" in done.stderr
