"""OLMo-core's Hugging Face converters in processes of their own, which nobody told of this package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")
pytest.importorskip("transformers")

from olmo_core.distributed.checkpoint import save_model_and_optim_state
from support import olmo_core_models as small

SOURCE = os.environ.get("OLMO_CORE_SRC")
SCRIPT = Path(SOURCE or "") / "src" / "examples" / "huggingface" / "convert_checkpoint_to_hf.py"
PROGRAM = """
import json, sys
from olmo_core.distributed.checkpoint import load_model_and_optim_state
from olmo_core.nn.hf import save_hf_model
from olmo_core.nn.transformer import TransformerConfig
folder, out = sys.argv[1:3]
model = TransformerConfig.from_dict(json.load(open(folder + "/config.json"))["model"]).build()
load_model_and_optim_state(folder + "/model_and_optim", model)
save_hf_model(out, model.state_dict(), model)
"""
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    """Blocks that OLMo-core converts in silence without the guard."""
    made = small.with_scheme(small.config("reordered_norm", qk_norm=True))
    path = tmp_path / "step1"
    save_model_and_optim_state(path / "model_and_optim", small.model(made))
    tokenizer = {"vocab_size": 64, "eos_token_id": 0, "pad_token_id": 1}
    (path / "config.json").write_text(
        json.dumps({"model": made.as_config_dict(), "dataset": {"tokenizer": tokenizer, "sequence_length": 16}})
    )
    return path


def _run(*words, **variables):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_guarded_and_with_the_guards_off(folder, tmp_path):
    program = tmp_path / "convert.py"
    program.write_text(PROGRAM)
    result = _run("-I", program, folder, tmp_path / "hf")
    assert result.returncode != 0 and "OLMo-core's converter drops the factor" in result.stderr, result.stderr[-2000:]
    assert not list(tmp_path.rglob("*.safetensors"))
    load = PROGRAM[: PROGRAM.index("save_hf_model(out")].replace(
        '["model"])', '["model"] | {"block": json.loads(sys.argv[3])})'
    )
    program.write_text(load + "print('loaded')")
    made = small.config("reordered_norm", qk_norm=True)
    for block, variable, wanted in (
        (made.block, "0", "CheckpointMismatchError"),
        (made.block, "1", "loaded"),
        (small.with_scheme(made).block, "1", "OLMO_LNS_DISABLE=1, but the config names olmo_lns.olmo_core.BlockConfig"),
    ):
        text = json.dumps(block.as_config_dict())
        result = _run(program, folder, tmp_path / "hf", text, OLMO_LNS_DISABLE=variable)
        assert wanted in result.stdout + result.stderr, result.stderr[-2000:]


@pytest.mark.skipif(not SOURCE, reason="OLMO_CORE_SRC does not name a checkout of OLMo-core")
def test_the_checkouts_script(folder, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(64)}, unk_token="2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="1")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ["--tokenizer", tmp_path / "tokenizer", "-s", "16", "--skip-validation"]
    result = _run(SCRIPT, "-i", folder, "-o", tmp_path / "hf", *options)
    said = " ".join(re.findall(r"[\w'.:-]+", result.stdout + result.stderr))  # rich breaks its lines
    assert result.returncode != 0 and "OLMo-core's converter drops the factor" in said, said[-2000:]
    assert not list(tmp_path.rglob("*.safetensors"))
