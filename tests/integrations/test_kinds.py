"""``olmo_lns.apply`` on models of many kinds: equal to hooks on the norms that their code shows, or refused."""

import copy
import itertools
from collections import UserDict

import pytest
import torch
from support import block_kinds as kinds
from torch import nn

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSError

X = torch.randn(2, 8, kinds.D, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(1, kinds.D, 6, 6, generator=torch.Generator().manual_seed(1))


def pairs(pattern, *indices):
    """Names of norms by block: each ``{}`` in the patterns is an index."""
    return [tuple(name.format(*index) for name in pattern.split()) for index in indices]


def in_list(pattern, count=4):
    return pairs(pattern, *((i,) for i in range(count)))


def run(model, x, trains, grad):
    model.train(trains)
    with torch.set_grad_enabled(grad):
        torch.manual_seed(2)
        return model(x)


def check(model, reference, expected, x):
    """Compare with a stock model whose norms have hooks, in four modes, and the gradients of a step."""
    for number, names in enumerate(expected, start=1):
        for name in names:
            factor = float(torch.tensor(number, dtype=torch.float64) ** -0.5)
            reference.get_submodule(name).register_forward_hook(
                lambda m, args, y, factor=factor: (
                    type(y)([factor * y[0], *y[1:]]) if isinstance(y, (list, tuple)) else factor * y
                )
            )
    for trains, grad in itertools.product((False, True), (False, True)):
        found, wanted = (run(each, x, trains, grad) for each in (model, reference))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for each in (model, reference):
        run(each, x, False, True).square().mean().backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def kinds_of(block):
    return lambda: kinds.Stack(block)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(kinds.D, 4, 64, norm_first=True, batch_first=True, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("make", "expected", "x"),
    [
        # In eval mode without gradients PyTorch's fused kernel reads the weights of the norms and never calls them.
        (encoder, in_list("layers.{0}.norm1 layers.{0}.norm2"), X),
        (lambda: encoder(activation="gelu"), in_list("layers.{0}.norm1 layers.{0}.norm2"), X),
        (lambda: encoder(bias=False), in_list("layers.{0}.norm1 layers.{0}.norm2"), X),
        (lambda: kinds.Stack(kinds.Fused), in_list("layers.{0}.norm"), X),
        (lambda: kinds.Stack(kinds.Wrapped), in_list("layers.{0}.inner.norm"), X),
        (lambda: kinds.Stack(kinds.Scales), in_list("layers.{0}.norm"), X),
        (
            lambda: kinds.Chunks(2, 3),
            pairs("blocks.{0}.{1}.n1 blocks.{0}.{1}.n2", (0, 0), (0, 1), (1, 2), (1, 3), (1, 4)),
            X,
        ),
        (lambda: kinds.Chunks(4), pairs("blocks.0.{0}.n1 blocks.0.{0}.n2", (0,), (1,), (2,), (3,)), X),
        (
            lambda: kinds.stages((32, 2), (48, 3)),
            pairs("{0}.blocks.{1}.n1 {0}.blocks.{1}.n2", (0, 0), (0, 1), (1, 0), (1, 1), (1, 2)),
            X,
        ),
        (lambda: kinds.stages((32, 3)), pairs("{0}.blocks.{1}.n1 {0}.blocks.{1}.n2", (0, 0), (0, 1), (0, 2)), X),
        (lambda: nn.Sequential(*(kinds.Pooled() for _ in range(4))), in_list("{0}.n1 {0}.n2"), IMAGES),
        (
            lambda: nn.Sequential(*(nn.Sequential(kinds.Fused(), kinds.Fused()) for _ in range(2))),
            pairs("{0}.{1}.norm", (0, 0), (0, 1), (1, 0), (1, 1)),
            X,
        ),
        (
            lambda: nn.Sequential(
                nn.Linear(kinds.D, kinds.D), *(kinds.Block() for _ in range(3)), nn.LayerNorm(kinds.D)
            ),
            pairs("{0}.n1 {0}.n2", (1,), (2,), (3,)),
            X,
        ),
        # Norms of other forms.
        (lambda: kinds.Stack(lambda: kinds.Block(norm=kinds.GainOutside)), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (lambda: kinds.Stack(lambda: kinds.Block(norm=kinds.Scaled)), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (lambda: kinds.Stack(lambda: kinds.SeveralBlock(tuple)), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (lambda: kinds.Stack(lambda: kinds.SeveralBlock(list)), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (lambda: kinds.Stack(kinds.ShiftedBlock), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (lambda: kinds.AdaptiveStack(kinds.AdaptiveBlock), in_list("layers.{0}.n1.norm layers.{0}.n2.norm"), X),
        (kinds.Joined, in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (kinds.Positions, in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (lambda: kinds.Replaced(), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (kinds_of(kinds.Closure), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (kinds_of(kinds.Locked), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (kinds_of(kinds.InPlace), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (kinds_of(kinds.RootBlock), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (
            kinds_of(lambda: kinds.Block(norm=lambda d: nn.LayerNorm((8, d)))),
            in_list("layers.{0}.n1 layers.{0}.n2"),
            X,
        ),
        (kinds_of(lambda: kinds.Block(norm=kinds.ByHead)), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        # Streams in other orders of dimensions, and other places.
        (lambda: nn.Sequential(*(kinds.Transposed() for _ in range(4))), in_list("{0}.n1 {0}.n2"), X.transpose(1, 2)),
        (lambda: nn.Sequential(*(kinds.Tokens() for _ in range(4))), in_list("{0}.n1 {0}.n2"), IMAGES),
        (lambda: kinds.ChangeStack(kinds.Change), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        (lambda: kinds.SecondStack(kinds.Second), in_list("layers.{0}.n1 layers.{0}.n2"), X),
        # What adds to the stream without a norm is no block.
        (lambda: kinds.Mixed(before=kinds.Adapter), in_list("layers.{0}.n1 layers.{0}.n2", 3), X),
        (lambda: kinds.Mixed(before=kinds.Squashed), in_list("layers.{0}.n1 layers.{0}.n2", 3), X),
        (lambda: kinds.Stack(kinds.Drops), in_list("layers.{0}.n1 layers.{0}.n2"), X),
    ],
)
def test_a_model_is_found_by_itself(make, expected, x):
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    reference = make()  # a copy would share functions that refer to a module
    olmo_lns.apply(model, example=x)
    check(model, reference, expected, x)


def test_the_hook_against_the_fused_kernel_survives_a_copy_and_goes_with_the_scheme():
    torch.manual_seed(0)
    model = encoder()
    reference = copy.deepcopy(model)
    copied = copy.deepcopy(olmo_lns.apply(model, example=X))
    check(copied, reference, in_list("layers.{0}.norm1 layers.{0}.norm2"), X)
    sites.remove_scheme(copied)
    assert not any(module._forward_pre_hooks for module in copied.modules())


@pytest.mark.parametrize(
    ("make", "norms", "names"),
    [
        (kinds.Pairs, lambda m: [(a.norm, f.norm) for a, f in m.layers], "layers.{0}.0.norm layers.{0}.1.norm"),
        (
            lambda: kinds.ResidualStack(kinds.Residual),
            lambda m: [(b.n1, b.n2) for b in m.layers],
            "layers.{0}.n1 layers.{0}.n2",
        ),
        (kinds.Stack, lambda m: [(b.n1, b.n2) for b in m.layers], "layers.{0}.n1 layers.{0}.n2"),
        (lambda: kinds.Stack(kinds.Fused), lambda m: [b.norm for b in m.layers], "layers.{0}.norm"),
        (kinds_of(kinds.OneOutput), lambda m: [b.norm for b in m.layers], "layers.{0}.norm"),
        (lambda: kinds.Alternating(True), lambda m: [(b.n1, b.n2) for b in m.dense], "dense.{0}.n1 dense.{0}.n2"),
        (kinds.Attributes, lambda m: [(b.n1, b.n2) for b in m.children()], "b{0}.n1 b{0}.n2"),
    ],
)
def test_given_norms_are_scaled_and_the_line_says_so(make, norms, names, capfd):
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    olmo_lns.apply(model, norms=norms(model), example=X)
    line = capfd.readouterr().err
    is_probed = make is not kinds.Pairs  # which runs no module that holds the two norms
    assert ("measured: sites, output, gradient" if is_probed else "measured: output, gradient") in line
    assert ("sites from norms=, not measured" in line) != is_probed
    check(model, reference, in_list(names), X)


def test_two_towers_get_the_scheme_one_after_the_other():
    torch.manual_seed(0)
    model = kinds.Towers()
    reference = copy.deepcopy(model)
    for tower in (model.image, model.text):
        olmo_lns.apply(model, blocks=tower.layers, example=X)
    for tower, count in (("image", 4), ("text", 3)):
        names = in_list("layers.{0}.n1 layers.{0}.n2", count)
        check(model.get_submodule(tower), reference.get_submodule(tower), names, X)


def test_a_part_that_the_example_does_not_run_is_named(capfd):
    olmo_lns.apply(model := kinds.Towers(), example=lambda model: model.text(X))
    assert "does not run it: image\n" in capfd.readouterr().err
    assert {name.partition(".")[0] for name, _, _ in sites.in_model(model)} == {"text"}


def test_iterators_and_slices_are_taken_with_and_without_weights():
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = kinds.Stack()
        olmo_lns.apply(model, norms=((b.n1, b.n2) for b in model.layers), example=X)
        with torch.device(device):
            model = kinds.Stack()
        olmo_lns.apply(model, blocks=model.layers[:], example=X)
        assert len(list(sites.in_model(model))) == 8


def test_an_example_of_any_mapping_is_keywords():
    model = olmo_lns.apply(kinds.Stack(), example=UserDict(x=X))
    assert len(list(sites.in_model(model))) == 8


def test_a_forward_leaves_neither_attributes_nor_buffers_nor_weights():
    model = kinds.Stateful()
    state, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    olmo_lns.apply(model, example=X)
    assert set(vars(model)) == attributes and model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_blocks_that_changed_their_order_are_refused():
    model = olmo_lns.apply(kinds.Stack(), example=X)
    model.layers = nn.ModuleList(list(model.layers)[::-1])
    with pytest.raises(LNSError, match="moved after the scheme was applied"):
        olmo_lns.apply(model, example=X)


class Heads(kinds.Stack):
    """:param at_end: two heads with a norm each behind the last block, and not one head behind each block."""

    def __init__(self, at_end):
        super().__init__()
        self.at_end = at_end
        self.heads = nn.ModuleList(nn.Sequential(nn.LayerNorm(kinds.D), nn.Linear(kinds.D, 5)) for _ in range(2))

    def forward(self, x):
        outputs = []
        for number, block in enumerate(self.layers):
            x = block(x)
            if not self.at_end and number < 2:
                outputs.append(self.heads[number](x))
        return [head(x) for head in self.heads] if self.at_end else sum(outputs) + self.out(x).mean()


class Skips(kinds.Stack):
    """A branch with a norm begins behind the first block and ends before the third."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(kinds.D), nn.Linear(kinds.D, kinds.D)

    def forward(self, x):
        x = self.layers[0](x)
        branch = self.linear(self.norm(x))
        return self.out(self.layers[3](self.layers[2](self.layers[1](x) + branch)))


@pytest.mark.parametrize("at_end", [False, True])
def test_norms_of_heads_between_blocks_or_of_several_heads_are_no_blocks(at_end):
    model = olmo_lns.apply(Heads(at_end), example=X)
    assert [site.layer_number for _, _, site in sites.in_model(model)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_branch_around_a_block_is_refused():
    with pytest.raises(LNSError, match="similar blocks outside of it: norm"):
        olmo_lns.apply(Skips(), example=X)


def test_buffers_and_what_a_change_of_mode_does_stay_as_they_were():
    model = kinds.Stack(kinds.Counting)
    state = copy.deepcopy(model.state_dict())
    olmo_lns.apply(model, example=X)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def hook_counts(model):
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


def shifted(model):
    first, *others = model.layers
    return [(a.n2, b.n1) for a, b in zip([first, *others], others, strict=False)]


REFUSED = {
    "attention alone": (lambda: kinds.Stack(kinds.AttentionAlone), {}, "one branch.*norms="),
    "attention with two outputs": (lambda: kinds.Stack(lambda: kinds.AttentionAlone(2)), {}, "one branch"),
    "attention without projection": (lambda: kinds.Stack(lambda: kinds.AttentionAlone(1, False)), {}, "one branch"),
    "experts alone": (lambda: kinds.Stack(kinds.SharedExperts), {}, "one branch"),
    "a function at the end": (lambda: kinds.Stack(kinds.FunctionalEnd), {}, "Sandwich"),
    "a function with a gain at the end": (lambda: kinds.Stack(lambda: kinds.FunctionalEnd(True)), {}, "Sandwich"),
    "a division at the end": (lambda: kinds.Stack(kinds.UnitAttention), {}, "Sandwich"),
    "two streams": (lambda: kinds.TwoStreamStack(kinds.TwoStreams), {}, "two streams"),
    "two joined streams": (lambda: kinds.TwoStreamStack(lambda: kinds.TwoStreams(True)), {}, "two streams"),
    "a stream of context": (lambda: kinds.TwoStreamStack(kinds.Context), {}, "two streams"),
    "a decoder that runs again": (kinds.EncoderDecoder, {}, "decoder.layers ran 3 times"),
    "a loop": (kinds.Looped, {}, "stack.layers ran 2 times"),
    "an encoder and a decoder": (lambda: kinds.EncoderDecoder(1), {}, "found encoder.layers, decoder.layers"),
    "PyTorch's encoder and decoder": (
        lambda: nn.Transformer(kinds.D, 4, 2, 2, 64, batch_first=True, norm_first=True),
        {"example": lambda m: (X, X)},
        "found encoder.layers, decoder.layers",
    ),
    "two towers": (kinds.Towers, {}, "found image.layers, text.layers"),
    "half of the chunks": (
        lambda: kinds.Chunks(2, 3),
        {"blocks": lambda m: list(m.blocks[0])},
        "similar blocks outside",
    ),
    "one stage": (lambda: kinds.stages((32, 2), (48, 3)), {"blocks": lambda m: m[1].blocks}, "similar blocks outside"),
    "another block before the list": (lambda: kinds.Mixed(kinds.Other), {}, "similar blocks outside of it: first"),
    "another block after the list": (lambda: kinds.Mixed(after=kinds.Other), {}, "similar blocks outside"),
    "a second list that is another's": (
        lambda: kinds.Mixed(after=kinds.Listed),
        {"blocks": lambda m: m.layers},
        "similar blocks outside",
    ),
    "a second list in another order": (lambda: kinds.Mixed(after=lambda: kinds.Listed((1, 0))), {}, "similar blocks"),
    "a second list that runs in part twice": (
        lambda: kinds.Mixed(after=lambda: kinds.Listed((0, 1, 1))),
        {},
        "similar",
    ),
    "groups of a list and a block": (
        lambda: nn.Sequential(*(kinds.Group(kinds.Other) for _ in range(2))),
        {},
        "norms read the stream",
    ),
    "a model in a Sequential with another block": (
        lambda: nn.Sequential(
            nn.Linear(kinds.D, kinds.D), kinds.Other(), kinds.Block(), kinds.Block(), nn.LayerNorm(kinds.D)
        ),
        {},
        "similar blocks",
    ),
    "blocks side by side": (lambda: kinds.SideBySide(), {}, "two streams|one after"),
    "blocks side by side on noise": (lambda: kinds.Noise(), {}, "two streams|one after"),
    "two rows of blocks": (lambda: kinds.Branching(), {}, "one after the other"),
    "a second list whose norms are functions": (
        lambda: kinds.Mixed(after=kinds.FunctionalPair),
        {},
        "outside of it: last",
    ),
    "a block with one norm in front": (lambda: kinds.Mixed(kinds.Fused), {}, "outside of it: first"),
    "given blocks beside functions": (
        lambda: kinds.Mixed(after=kinds.FunctionalPair),
        {"blocks": lambda m: m.layers},
        "similar blocks outside",
    ),
    "a stream that is normalized between blocks": (kinds.Between, {}, "normalized between the blocks 1 and 2.*norms="),
    "a third branch that is switched off": (lambda: kinds.Stack(lambda: kinds.Gated(1.0, 0.0)), {}, "n3 runs without"),
    "attention that is switched off": (lambda: kinds.Stack(lambda: kinds.Gated(0.0, 1.0)), {}, "n1 runs without"),
    "a function at the end in training": (lambda: kinds.Stack(kinds.TrainingEnd), {}, "ends in a norm that is a func"),
    "a branch in training": (lambda: kinds.Stack(kinds.TrainingBranch), {}, "in training mode its branches bypass"),
    "blocks in training": (lambda: kinds.TrainingBlocks(after=kinds.Listed), {}, "training mode its forward runs last"),
    "blocks in training whose norms are functions": (
        lambda: kinds.TrainingBlocks(after=kinds.FunctionalPair),
        {},
        "training mode its forward runs last",
    ),
    "a factor of its own": (
        kinds.own_factors,
        {},
        r"Block 2 .* by sqrt\(1/2\). This model therefore has LayerNorm Scaling",
    ),
    "two layers of one branch": (lambda: kinds.Stack(lambda: kinds.TwoLayers(kinds.Layer)), {}, "built alike"),
    "two parallel blocks": (kinds_of(kinds.TwoParallel), {}, "built alike"),
    "a bypass where there are gradients": (kinds_of(kinds.Bypass), {}, "with gradients its branches bypass"),
    "a summary of the stream": (lambda: kinds.SummaryStack(kinds.Summary), {}, "block 2 reads the model's stream"),
    "signs": (lambda: kinds.Stack(lambda: kinds.Block(norm=kinds.Spikes)), {}, "none of its modules is a norm"),
    "a stage of another width": (kinds.TwoStages, {"blocks": lambda m: m.two}, "one.*all blocks"),
    "one norm a layer": (kinds.Flat, {"norms": lambda m: [layer.norm for layer in m.layers]}, "pass its two norms"),
    "a first block whose norms have another name": (lambda: kinds.Mixed(kinds.RootBlock), {}, "outside of it: first"),
    "half of the norms of another name": (
        kinds_of(kinds.RootBlock),
        {"norms": lambda m: [(b.n1, b.n2) for b in m.layers[:2]]},
        "not passed",
    ),
    "lazy modules": (lambda: nn.Sequential(nn.LazyLinear(kinds.D), kinds.Stack()), {}, "Run the model once"),
    "norms that take a condition": (
        lambda: kinds.AdaptiveStack(kinds.AdaptiveBlock),
        {"norms": lambda m: [(b.n1, b.n2) for b in m.layers]},
        "n1.norm, n2.norm",
    ),
    "norms of a part of the blocks": (
        kinds.Stack,
        {"norms": lambda m: [(b.n1, b.n2) for b in m.layers[1:]]},
        "not passed",
    ),
    "norms of pairs without a module": (
        kinds.Pairs,
        {"norms": lambda m: [(a.norm, f.norm) for a, f in m.layers[:2]]},
        "not passed",
    ),
    "three of four attributes": (
        kinds.Attributes,
        {"blocks": lambda m: list(m.children())[:3]},
        "similar blocks outside",
    ),
    "an encoder of two": (lambda: kinds.EncoderDecoder(1), {"blocks": lambda m: m.encoder.layers}, "similar blocks"),
    "blocks in another order": (kinds.Stack, {"blocks": lambda m: m.layers[::-1]}, "in this order"),
    "blocks of another model": (kinds.Stack, {"blocks": lambda m: kinds.Stack().layers}, "no part of this Stack"),
    "no module runs a block": (
        kinds.Pairs,
        {},
        r"norms=\[\(block\[0\].norm, block\[1\].norm\) for block in model.layers\]",
    ),
    "hidden and residual": (lambda: kinds.ResidualStack(kinds.Residual), {}, r"norms=\[\(block.n1, block.n2\)"),
    "a norm twice": (kinds.Stack, {"norms": lambda m: [(b.n1, b.n1) for b in m.layers]}, "passed twice"),
    "a norm of another model": (
        kinds.Stack,
        {"norms": lambda m: [(b.n1, nn.LayerNorm(2)) for b in m.layers]},
        "no part",
    ),
    "norms in another order": (kinds.Stack, {"norms": lambda m: [(b.n2, b.n1) for b in m.layers]}, "in place 1"),
    "pairs of unequal length": (
        kinds.Stack,
        {"norms": lambda m: [(m.layers[0].n1,), (m.layers[1].n1, m.layers[1].n2)]},
        "1 and 2 norms for a block",
    ),
    "pairs of two blocks": (kinds.Stack, {"norms": shifted}, "not all norms of these blocks"),
    "a norm that runs twice": (kinds.Looped, {"norms": lambda m: [(b.n1, b.n2) for b in m.stack.layers]}, "2 times"),
    "a norm that does not run": (
        kinds.Towers,
        {"norms": lambda m: [(b.n1, b.n2) for b in m.text.layers], "example": lambda m: lambda m: m.image(X)},
        "0 times",
    ),
    "no norms": (kinds.Stack, {"norms": lambda m: 3}, "pairs of modules"),
    "blocks and norms": (
        kinds.Stack,
        {"norms": lambda m: [(b.n1, b.n2) for b in m.layers], "blocks": lambda m: m.layers},
        "Pass one of them",
    ),
    "attention with a fused output": (
        kinds_of(lambda: kinds.OneOutput(["attention"])),
        {"norms": lambda m: [b.norm for b in m.layers]},
        "one branch reads norm",
    ),
    "a feed-forward with a fused output": (
        kinds_of(lambda: kinds.OneOutput(["mlp"])),
        {"norms": lambda m: [b.norm for b in m.layers]},
        "its norm keys runs without any effect",
    ),
    "every second block": (
        kinds.Alternating,
        {"norms": lambda m: [(b.n1, b.n2) for b in m.dense]},
        "sparse runs between the blocks",
    ),
    "a stream that a wrapper normalises": (
        kinds_of(kinds.Normed),
        {"norms": lambda m: [(b.inner.n1, b.inner.n2) for b in m.layers]},
        "reads its stream elsewhere",
    ),
    "a stream that is read elsewhere": (
        lambda: kinds.Stack(kinds.Fused),
        {"norms": lambda m: [(b.norm, b.o) for b in m.layers]},
        "given by norms= is no norm",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_wrong_is_refused_and_left_unchanged(kind):
    make, options, message = REFUSED[kind]
    torch.manual_seed(0)
    model = make()
    types, hooks = [type(module) for module in model.modules()], hook_counts(model)
    options = {name: make_option(model) for name, make_option in options.items()}
    with pytest.raises(LNSError, match=f"(?s){message}"):
        olmo_lns.apply(model, **{"example": X, **options})
    assert [type(module) for module in model.modules()] == types and not list(sites.in_model(model))
    assert hook_counts(model) == hooks
