"""The labels of the causal-LM families, derived again from the additions of a real forward, and the hooks that use them."""

import json

import pytest
import torch
from support import trace_families
from support.hooked import hooked

transformers = pytest.importorskip("transformers", "5.0")
LABELS = json.loads(trace_families.FILE.read_text())


@pytest.mark.parametrize(
    "kind",
    ["llama", "gpt2", "mixtral", "gptj", "cohere", "olmo2", "gemma2", "bert", "minimax", "mamba", "jamba", "dbrx"],
)
def test_a_family_has_the_label_and_the_sites_of_the_committed_file(kind):
    assert trace_families.describe(kind) == LABELS[kind]


def test_the_file_has_the_families_of_the_installed_transformers():
    if transformers.__version__ != "5.23.0":
        pytest.skip("families.json was made with transformers 5.23.0")
    assert LABELS.keys() == trace_families.families().keys()


@pytest.mark.parametrize("kind", ["llama", "phi", "axk2"])
def test_hooks_multiply_the_output_of_each_site(kind):
    row, (model, ids) = LABELS[kind], trace_families.tiny(kind)
    seen = []
    blocks = model.get_submodule(row["blocks"])
    for number, block in enumerate(blocks):
        names = row["sites"] if isinstance(row["sites"][0], str) else row["sites"][number]
        for name in names:
            block.get_submodule(name).register_forward_hook(lambda m, a, out: seen.append(out))
    hooked(model, blocks, row["sites"])
    for number, block in enumerate(blocks):
        for name in row["sites"] if isinstance(row["sites"][0], str) else row["sites"][number]:
            block.get_submodule(name).register_forward_hook(
                lambda m, a, out, n=number + 1: torch.testing.assert_close(out, seen[-1] * n**-0.5)
            )
    trace_families.forward(model, ids)
    assert (
        len(seen) == sum(map(len, row["sites"]))
        if isinstance(row["sites"][0], list)
        else len(seen) == 3 * len(row["sites"])
    )
