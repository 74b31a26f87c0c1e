"""Every model family under a scheme, against stock models whose norms or branches are multiplied by hooks."""

import copy
import sys

import pytest
import torch
from support import launch
from support.transformers_models import (  # noqa: F401
    IN_FRONT,
    LLAMA_OUTPUTS,
    MODELS,
    OUTPUTS,
    blocks,
    environment,
    hooked,
    inputs,
    same,
    schemes,
    stock,
)

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.transformers import apply, fold

transformers = pytest.importorskip("transformers")
AFTER = ("lnsafterbranch", "lnsafterattn", "lnsafterff")


@pytest.mark.parametrize("scheme", ["lns", *AFTER])
@pytest.mark.parametrize("kind", IN_FRONT)
def test_a_scheme_equals_a_stock_model_with_hooks(kind, scheme, schemes):  # noqa: F811
    model = stock(kind).double()
    reference = hooked(kind, model, scheme, exponent=0.25)
    keys = list(model.state_dict())
    assert apply(model, f"{scheme}:exponent=0.25", initialization="upstream") is model
    assert list(model.state_dict()) == keys
    same(kind, model, reference)
    assert str(norm_sites.read_back(model)) == f"{scheme}:exponent=0.25"


@pytest.mark.parametrize("kind", [kind for kind in ("olmo2", "olmo3") if kind in MODELS])
def test_a_model_with_norms_on_its_branches_takes_a_branch_factor_and_refuses_lns(kind, schemes):  # noqa: F811
    model = stock(kind)
    reference = hooked(kind, model, "branchnorm")
    apply(model, "branchnorm")
    same(kind, model, reference)
    with pytest.raises(
        LNSConfigError, match=rf"scheme lns .* on {kind}: its blocks have one norm after each sub-layer"
    ):
        apply(stock(kind), "lns")


@pytest.mark.parametrize("kind", MODELS)
def test_a_folded_model_is_stock_and_computes_the_same(kind, schemes):  # noqa: F811
    for scheme in ("branchnorm",) if kind in ("olmo2", "olmo3") else ("lns", *AFTER):
        model = stock(kind)
        kinds = [type(module) for module in model.modules()]
        with torch.no_grad():
            expected = apply(model, scheme, initialization="upstream")(**inputs(kind)).logits
            folded = fold(model)(**inputs(kind)).logits
        assert [type(module) for module in model.modules()] == kinds
        assert type(model.config).__name__ == MODELS[kind][1] and model.config.lns_record["folded"]
        assert (folded - expected).abs().max() <= 3e-6 * expected.abs().max(), scheme
        with pytest.raises(CheckpointMismatchError, match="folded"):
            apply(model, scheme)


def _bert():
    small = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return transformers.BertForMaskedLM(transformers.BertConfig(**small))


@pytest.mark.parametrize(
    ("make", "scheme", "message"),
    [
        (lambda: stock("llama"), "anotherform", "scheme anotherform .* on llama: .* block 1, attn, would need another"),
        (lambda: stock("llama"), "preln", "nothing to apply"),
        (_bert, "lns", r"'bert'\) \(its norms follow the addition.*the transformers integration knows"),
        (lambda: stock("gpt2", add_cross_attention=True), "lns", "third sub-layer"),
    ],
)
def test_a_scheme_that_does_not_fit_the_model_is_refused(make, scheme, message, schemes):  # noqa: F811
    with pytest.raises(LNSConfigError, match=message):
        apply(make(), scheme)


def test_apply_is_refused_twice_and_on_weights_that_may_be_trained(tmp_path):
    model = apply(stock("llama"))
    with pytest.raises(CheckpointMismatchError, match="lns:exponent=0.5 .* already"):
        apply(model)
    stock("llama").save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    drawn = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    for model in (loaded, drawn):
        with pytest.raises(CheckpointMismatchError, match="trained=False.*not under lns.*trained=True"):
            apply(model)
    same("llama", apply(loaded, trained=True), hooked("llama", stock("llama")))
    drawn.load_state_dict(stock("llama").state_dict())
    same("llama", apply(drawn, trained=False), hooked("llama", stock("llama")))


def test_a_replaced_forward_is_found_and_not_saved(tmp_path):
    model = apply(stock("llama"))
    norm = blocks("llama", model)[1].input_layernorm
    norm.forward = lambda x: x
    with pytest.raises(UpstreamChangedError, match=r"norm_scale=1.0 instead of 0.707"):
        norm_sites.read_back(model)
    with pytest.raises(CheckpointMismatchError, match="block 2: .*norm_scale=1.0 instead of 0.707"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_norm_of_another_class_has_its_output_multiplied():
    class Liger(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.eps = norm.weight, norm.variance_epsilon

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    model = stock("llama")
    for block in model.model.layers:
        block.input_layernorm = Liger(block.input_layernorm)
    reference = hooked("llama", model)
    apply(model)
    same("llama", model, reference)


@pytest.mark.parametrize(("kind", "scheme"), [("llama", "lns"), ("gpt2", "lnsafterbranch"), ("vit", "lns")])
def test_hidden_states_and_attentions_equal_those_of_the_hooked_model(kind, scheme, tmp_path, schemes):  # noqa: F811
    def outputs(model):
        with torch.no_grad():
            found = model(**inputs(kind), output_hidden_states=True, output_attentions=True)
        return [*found.hidden_states, *found.attentions]

    reference = hooked(kind, stock(kind, attn_implementation="eager"), scheme)
    model = apply(stock(kind, attn_implementation="eager"), scheme, initialization="upstream")
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForImageClassification if kind == "vit" else transformers.AutoModelForCausalLM
    for other in (model, auto.from_pretrained(tmp_path, attn_implementation="eager").eval()):
        torch.testing.assert_close(outputs(other), outputs(reference))


@pytest.mark.parametrize("kind", MODELS)
def test_initialization_is_plain_under_a_scheme_unless_asked_otherwise(kind, schemes):  # noqa: F811
    """Every matrix of a block has the same std; without a scheme GPT-2's output projections have a smaller one."""
    scheme = "branchnorm" if kind in ("olmo2", "olmo3") else "lns"
    wide = {"n_embd": 128} if kind == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
    outputs = OUTPUTS.get(kind, LLAMA_OUTPUTS)

    def ratio(model):
        of, others = [], []
        for block in blocks(kind, model):
            for name, parameter in block.named_parameters():
                if parameter.dim() == 2:
                    (of if name.removesuffix(".weight") in outputs else others).append(parameter.std())
        return (torch.stack(of).mean() / torch.stack(others).mean()).item()

    plain = stock(kind, large=False, **wide)
    assert ratio(plain) == pytest.approx(6**-0.5 if kind == "gpt2" else 1.0, abs=0.03)
    applied = apply(copy.deepcopy(plain), scheme)
    assert ratio(applied) == pytest.approx(1.0, abs=0.03)
    applied.apply(applied._init_weights)  # as a launcher that builds on the meta device does
    assert ratio(applied) == pytest.approx(1.0, abs=0.03)
    scaled = apply(copy.deepcopy(plain), scheme, initialization="scaled")
    assert ratio(scaled) == pytest.approx(6**-0.5, abs=0.03)
    upstream = apply(copy.deepcopy(plain), scheme, initialization="upstream")
    assert ratio(upstream) == ratio(plain)


def test_another_process_unpickles_a_model(tmp_path, schemes):  # noqa: F811
    for kind, scheme in (("llama", "lns"), ("llama", "lnsafterbranch"), ("gpt2", "lnsafterattn")):
        torch.save(apply(stock(kind), scheme), tmp_path / f"{kind}-{scheme}.pt")
    program = "import sys, torch; [print(type(torch.load(file, weights_only=False))) for file in sys.argv[1:]]"
    files = sorted(tmp_path.iterdir())
    done = launch.run([sys.executable, "-c", program, *files], cwd=tmp_path, env=environment())
    assert done.code == 0 and done.text.count("LNSLlamaForCausalLM") == 2, done.text
