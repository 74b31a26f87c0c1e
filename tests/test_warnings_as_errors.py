"""With `python -W error`, the package does what stock software does there: a warning of its own would stop a launch."""

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

#: Builds a tiny Llama. Stock software must get through this first.
BUILD = """
import sys, torch, transformers
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
model, ids = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), torch.arange(8)[None]
"""
TRANSFORMERS = """
import olmo_lns
olmo_lns.plain_initialization(olmo_lns.apply(model))
model(input_ids=ids, labels=ids).loss.backward()
model.save_pretrained(sys.argv[1])
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
olmo_lns.fold(model)
"""
ANY_MODEL = """
layer = torch.nn.TransformerEncoderLayer(32, 4, 48, norm_first=True, batch_first=True)
encoder, x = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 8, 32)
olmo_lns.apply(encoder, example=x)
encoder(x).sum().backward()
record = olmo_lns.record(encoder)
olmo_lns.require(encoder, record)
olmo_lns.fold(encoder, example=x)
"""
COMMANDS = """
from olmo_lns.cli import main
assert main(["export", sys.argv[1], sys.argv[1] + "-folded"]) == 0
assert main(["verify", sys.argv[1], sys.argv[1] + "-folded"]) == 0
main(["doctor"])
"""


def run(code, folder):
    command = [sys.executable, "-W", "error", "-c", code, str(folder / "model")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_nothing_of_the_package_warns(tmp_path):
    if (stock := run(BUILD, tmp_path)).returncode:
        pytest.skip(f"stock transformers does not run with -W error here: {stock.stderr.splitlines()[-1:]}")
    done = run(BUILD + TRANSFORMERS + ANY_MODEL + COMMANDS, tmp_path)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stdout[-1000:] + done.stderr[-3000:]
    assert "PASS" in done.stdout
