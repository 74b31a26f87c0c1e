"""Every causal-LM family of transformers: accepted, equal to hooks, saved, loaded and folded; or refused."""

import copy
import json
import re

import pytest
import torch
from support.families import FAMILIES_FILE, families, forward, tiny
from support.hooked import hooked
from support.marks import EXHAUSTIVE

from olmo_lns import sites
from olmo_lns.errors import LNSError
from olmo_lns.integrations.transformers import apply, fold

transformers = pytest.importorskip("transformers")
ROWS = {kind: row for kind, row in json.loads(FAMILIES_FILE.read_text()).items() if kind in families()}
ACCEPTED = [kind for kind, row in ROWS.items() if row["label"] in ("pre", "parallel")]
REFUSED = [kind for kind, row in ROWS.items() if row["label"] in ("post", "branch", "sandwich", "other")]
#: Not slow: dense, with biases, parallel with two norms and with one, experts, latent attention, zero-centered weights.
USUAL = ("llama", "gpt2", "gpt_neox", "falcon", "mixtral", "deepseek_v3", "gemma")
#: Slow tests: blocks with linear attention, whose norms are zero-centered, with Mamba, and with hyper-connections.
OTHER_MIXERS = {"qwen3_next", "bamba", "qwen4_exp"}


def depth_of_norms(kind):
    """Return the nesting of a family's norms. Norms are found by what they do, so their names do not matter."""
    return re.sub(r"[^.,\[\]]", "", json.dumps(ROWS[kind]["sites"]))


def rows(kinds, usual, form):
    """The usual families, the first of every other form as a slow test, and the rest as exhaustive tests.

    A form is a label with ``form(kind)``. Llama's form alone has more than eighty families.
    """
    forms = {(ROWS[kind]["label"], form(kind)): kind for kind in [*reversed(kinds), *usual]}
    first = {*OTHER_MIXERS, *forms.values()}
    return [
        pytest.param(kind, marks=[] if kind in usual else [pytest.mark.slow] if kind in first else EXHAUSTIVE)
        for kind in kinds
    ]


def relative(found, expected):
    return (found - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize("kind", rows(ACCEPTED, USUAL, depth_of_norms))
@torch.no_grad()
def test_a_family_equals_hooks_before_and_after_saving_and_folding(kind, tmp_path):
    model, ids = tiny(kind)
    stock, row = forward(model, ids), ROWS[kind]
    reference = copy.deepcopy(model)
    expected = forward(hooked(reference, reference.get_submodule(row["blocks"]), row["sites"], exponent=0.25), ids)
    assert relative(stock, expected) > 1e-3
    apply(model, "lns:exponent=0.25", initialization="upstream", trained=True)
    assert relative(forward(model, ids), expected) <= 1e-5
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"lns_{reference.config.model_type}"
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert relative(forward(loaded, ids), expected) <= 1e-5
    fold(model)
    assert type(model) is type(reference) and relative(forward(model, ids), expected) <= 1e-5


@pytest.mark.parametrize(
    "kind", rows(REFUSED, ("bert", "olmo2", "gemma2", "mamba"), lambda kind: json.dumps(ROWS[kind].get("sites")))
)
def test_a_family_of_another_form_is_refused_and_left_as_it_was(kind):
    model, ids = tiny(kind)
    before, kinds = forward(model, ids), [type(module) for module in model.modules()]
    with pytest.raises(LNSError):
        apply(model)
    assert kinds == [type(module) for module in model.modules()] and not list(sites.in_model(model))
    assert torch.equal(forward(model, ids), before)


def test_most_families_are_accepted():
    assert len(ACCEPTED) >= 90
