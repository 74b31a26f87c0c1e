"""`torchrun -m olmo_lns analyze`: two processes give the numbers of one, and both report an error that one finds."""

import json
import sys

import numpy as np
import pytest
import torch
from support import launch

from olmo_lns import cli

pytestmark = pytest.mark.slow
ANGULAR = pytest.param("angular", marks=pytest.mark.exhaustive)


def torchrun(folder, *arguments):
    return launch.torchrun(sys.executable, 2, "-m", "olmo_lns", "analyze", *map(str, arguments), "--quiet", cwd=folder)


def options(model, data, batch_size):
    return "--model", model, "--data", data, "--sequence-length", 16, "--batch-size", batch_size


@pytest.mark.parametrize(
    "batch_size",
    [
        pytest.param(13, id="three batches", marks=pytest.mark.exhaustive),
        pytest.param(64, id="one batch: the second rank has none"),
    ],
)
@pytest.mark.parametrize("what", ["variance", ANGULAR])
def test_two_ranks_give_the_numbers_of_one(what, batch_size, olmo_folder, token_file, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    common = options(olmo_folder, token_file, batch_size)
    assert cli.main(["analyze", what, *map(str, common), "--quiet", "-o", str(tmp_path / "one.json")]) == 0
    torchrun(tmp_path, what, *common, "-o", "two.json").ok()
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["settings"]["ranks"], two["settings"]["ranks"]) == (1, 2)
    assert one["result"].keys() == two["result"].keys() and one["result"]["tokens"] == two["result"]["tokens"] == 600
    for key, value in one["result"].items():
        if key == "distance":
            value, other = np.concatenate(value), np.concatenate(two["result"][key])
        elif isinstance(value, list):
            other = two["result"][key]
        else:
            continue
        np.testing.assert_allclose(other, value, rtol=1e-12)


@pytest.mark.exhaustive
def test_an_error_that_one_rank_finds_is_reported_by_all(olmo_folder, tmp_path):
    """Token 5, whose embedding is NaN, comes in the second batch only."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.yaml", "lns.json"):
        (broken / name).write_bytes((olmo_folder / name).read_bytes())
    weights = torch.load(olmo_folder / "model.pt", weights_only=True)
    weights["transformer.wte.weight"][5] = float("nan")
    torch.save(weights, broken / "model.pt")
    np.repeat([7, 5], 32).astype(np.uint16).tofile(tmp_path / "tokens.npy")
    result = torchrun(tmp_path, "variance", *options(broken, "tokens.npy", 2))
    assert result.code != 0 and "block 1 is the first whose output holds NaN or infinity" in result.text
    assert "Connection closed by peer" not in result.text
