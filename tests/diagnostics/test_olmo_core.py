"""Diagnostics of an OLMo-core checkpoint, as its checkpointer writes it."""

import json

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import numpy as np
import torch
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from support import olmo_core_models as small

from olmo_lns import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("models") / "step4"
    made = small.with_scheme(small.config(vocab_size=97))
    model = small.model(made)
    save_model_and_optim_state(folder / "model_and_optim", model)
    tokenizer = {"vocab_size": 97, "eos_token_id": 1, "pad_token_id": 0, "identifier": str(tokenizer_file)}
    config = {"model": made.as_config_dict(), "dataset": {"sequence_length": 32, "tokenizer": tokenizer}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def test_the_variance_is_that_of_the_blocks_outputs(folder, tmp_path):
    path, model = folder
    ids = np.random.default_rng(0).integers(4, 97, 64).astype(np.uint16)
    ids.tofile(tmp_path / "ids.npy")
    words = ["--model", path, "--data", tmp_path / "ids.npy", "--sequence-length", 32, "--quiet"]
    words += ["--device", "cpu", "-o", tmp_path / "out.json"]
    assert cli.main(["analyze", "variance", *map(str, words)]) == 0
    outputs = []
    for block in model.blocks.values():
        block.register_forward_hook(lambda _, __, out: outputs.append(out.double().var(-1, unbiased=False).mean()))
    with torch.no_grad():
        model(torch.from_numpy(ids.astype(np.int64)).view(2, 32))
    found = json.loads((tmp_path / "out.json").read_text())
    np.testing.assert_allclose(found["blocks"]["variance"], torch.stack(outputs).numpy(), rtol=1e-4)
    assert found["settings"]["scheme"].startswith("lns")
