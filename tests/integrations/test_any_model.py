"""``olmo_lns.apply`` on models that no integration knows, against stock models with hooks."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.hooked import hooked
from support.marks import EXHAUSTIVE
from support.other_models import IDS, MODELS, WIDTH, Block, Model, own
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.scaled import ScaledGainNorm


def losses(model, steps=3):
    """The losses of a few steps of training."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        output = model(IDS)
        logits = getattr(output, "logits", output)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1)[:, :96], IDS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _compile(model, blocks):
    torch._dynamo.reset()
    model.compile(backend="aot_eager")


def _checkpoint(model, blocks):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(child is block for block in blocks):
                setattr(parent, name, checkpoint_wrapper(child))


def _shard(model, blocks):
    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def marks(kind, wrapping):
    """Compilation takes most of this test's time. One model of ours is enough to show that the norms can be traced.

    Blocks in groups are wrapped in the same way as those that are not.
    """
    if wrapping is _compile:
        return pytest.mark.slow if kind == "own" else EXHAUSTIVE
    return EXHAUSTIVE if wrapping and kind == "olmo in groups" else []


@pytest.mark.parametrize(
    ("kind", "wrapping"),
    [
        pytest.param(kind, wrapping, marks=marks(kind, wrapping))
        for kind in MODELS
        for wrapping in (None, _compile, _checkpoint, _shard)
    ],
)
def test_a_model_trains_as_one_with_hooks(kind, wrapping, one_rank):
    model, blocks, names = MODELS[kind]()
    model.eval()  # without dropout
    reference = copy.deepcopy(model)
    paths = {module: name for name, module in model.named_modules()}
    hooked(reference, [reference.get_submodule(paths[block]) for block in blocks], names, exponent=0.25)
    keys, blocks = list(model.state_dict()), list(blocks)
    assert olmo_lns.apply(model, "lns:exponent=0.25", example=IDS) is model and list(model.state_dict()) == keys
    if wrapping is not None:
        wrapping(model, blocks)
    expected = losses(reference)
    assert losses(model) == pytest.approx(expected, rel=2e-6)
    assert losses(MODELS[kind]()[0].eval()) != pytest.approx(expected, rel=1e-4)


def test_applied_again_it_is_measured_again_and_another_scheme_is_refused(capfd):
    model, state = own()[0], torch.get_rng_state()
    first = olmo_lns.apply(model).layers["1"].n1
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert olmo_lns.apply(model) is model and first.lns_scale == 2**-0.5
    line = "LayerNorm Scaling on: 8 norms (RMSNorm); s = 1 (block 1) to 0.5 (block 4)"
    assert capfd.readouterr().err.count(line) == 2
    with pytest.raises(LNSConfigError, match="lns already"):
        olmo_lns.apply(model, "lns:exponent=0.25")
    first.forward = lambda x: x
    with pytest.raises(LNSError):
        olmo_lns.apply(model)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.RMSNorm, lambda width: nn.LayerNorm(width, elementwise_affine=False)]
)
def test_the_gain_of_torchs_own_norms_is_multiplied(norm):
    model = olmo_lns.apply(Model(norm=norm), example=IDS)
    assert {isinstance(each, ScaledGainNorm) for _, each, _ in sites.in_model(model)} == {True}


def test_what_a_forward_takes_may_be_given_in_four_ways():
    for example in (IDS, (IDS,), {"ids": IDS}, lambda model: model(IDS)):
        assert sum(1 for _ in sites.in_model(olmo_lns.apply(Model(), example=example))) == 8


# Blocks that compute in other ways: their forwards


def by_keyword(self, x):
    x = x + self.attn(self.n1(hidden_states=x))
    return x + self.mlp(self.n2(hidden_states=x))


def parallel(self, x):
    h = self.n1(x)
    return x + self.attn(h) + self.mlp(h)


def dropped(self, x):
    if self.training and torch.rand(()) < 0.5:
        return x
    return x + F.dropout(self.attn(self.n1(x)), 0.1, self.training) + self.mlp(self.n2(x))


def past_the_norm(self, x):
    return Block.forward(self, x) if not self.training else x + self.attn(x) + self.mlp(self.n2(x))


def fused_in_half(self, x):
    n1 = self.n1(x) if x.dtype == torch.float32 else F.rms_norm(x, (WIDTH,), self.n1.weight)
    return x + self.attn(n1) + self.mlp(self.n2(x))


def last_is_post(self, x):
    return Block.forward(self, x) if self.number < 3 else self.n2(self.mlp(self.n1(self.attn(x) + x)) + x)


def functional(self, x):
    x = x + self.attn(F.rms_norm(x, x.shape[-1:]))
    return x + self.mlp(F.rms_norm(x, x.shape[-1:]))


def only_once(self, x):
    if hasattr(self, "ran"):
        raise RuntimeError("the cache is full")
    self.ran = True
    return Block.forward(self, x)


class Running(nn.RMSNorm):
    """Has statistics that a call in training moves, and takes keywords alone."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("size", torch.ones(()))

    def forward(self, hidden_states):
        if self.training:
            self.size.lerp_(hidden_states.detach().square().mean(), 0.5)
        return super().forward(hidden_states) * self.size


class Growing(nn.RMSNorm):
    """Has a gain that each call in training raises for the next one."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        y = super().forward(x) * self.gain
        if self.training:
            self.gain = self.gain + 0.1
        return y


def fused_for_gradients(self, x):
    """Replace the first norm by a kernel where gradients of x are computed, unless the norm has a hook."""
    is_fused = x.requires_grad and not (self.n1._forward_hooks or self.n1._forward_pre_hooks)
    n1 = F.rms_norm(x, (WIDTH,), self.n1.weight) if is_fused else self.n1(x)
    x = x + self.attn(n1)
    return x + self.mlp(self.n2(x))


def with_taps():
    """Norms with a part of their own, and a list of modules without parameters beside that of the blocks."""

    class WithDropout(nn.RMSNorm):
        def __init__(self, width):
            super().__init__(width)
            self.dropout = nn.Dropout(0.0)

        def forward(self, x):
            return self.dropout(super().forward(x))

    model = Model(norm=WithDropout)
    model.taps = nn.ModuleList(nn.Sequential(nn.Identity()) for _ in model.layers)
    for layer, tap in zip(model.layers.values(), model.taps, strict=True):
        layer.register_forward_hook(lambda module, args, output, tap=tap: tap(output))
    return model


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: Model(by_keyword, norm=Running), ("n1", "n2")),
        (lambda: Model(norm=Growing), ("n1", "n2")),
        (lambda: Model(fused_for_gradients), ("n1", "n2")),
        (lambda: Model(parallel), ("n1",)),
        (lambda: Model(dropped), ("n1", "n2")),
        (lambda: Model(half=True).bfloat16(), ("n1", "n2")),
        (lambda: Model(tail=lambda model: nn.Sequential(nn.RMSNorm(WIDTH), nn.Dropout(0.0))), ("n1", "n2")),
        (with_taps, ("n1", "n2")),
    ],
)
def test_a_model_equals_hooks_in_training(model, names, capsys):
    reference, model = model(), model()
    hooked(reference, reference.layers.values(), names)
    olmo_lns.apply(model, example=IDS)
    assert f"LayerNorm Scaling on: {len(names) * len(model.layers)} norms" in capsys.readouterr().err
    found, expected = (torch.random.manual_seed(2) and each(IDS) for each in (model, reference))
    assert (found - expected).norm() <= (1e-6 if found.dtype == torch.float32 else 0.01) * expected.norm()


def first_outside():
    model = Model(keys="0")
    model.embedding.append(type(model.layers["0"])(0))
    return model


def quantized():
    model = Model()
    model.layers["0"].o.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)
    model.layers["0"].o.forward = lambda x: x
    return model


def some_blocks(model):
    return list(model.layers.values())[1:]


def compiled():
    (model := Model()).compile()
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: Model(last_is_post), {}, "block 4 .* is not Pre-LN"),
        (lambda: Model(past_the_norm), {}, "in training"),
        (lambda: Model(fused_in_half).bfloat16(), {}, "layers.0.n1 0 times"),
        (lambda: Model(lambda self, x: x + self.attn(self.n1(x))), {}, "one branch"),
        (lambda: Model(lambda self, x: x + self.mlp(self.n1(x))), {}, "one branch"),
        (lambda: Model(lambda self, x: x + self.attn(self.n1(x), self.n2(x))), {}, "one branch"),
        (lambda: Model(tail=lambda model: model.layers["3"].n2), {}, "layers.3.n2 2 times"),
        (first_outside, {}, "outside of it"),
        (lambda: Model(keys="23"), {}, "stages"),
        (lambda: Model(functional), {}, "of its modules is a norm"),
        (lambda: Model(only_once), {}, "a second time"),
        (lambda: nn.Sequential(nn.Embedding(96, 8), nn.Linear(8, 8)), {}, "found none"),
        (Model, {"example": torch.zeros(2, 3)}, "does not take the example"),
        (lambda: nn.Sequential(*(Block(8) for _ in range(2))), {"example": None}, "as example="),
        (quantized, {}, "before the quantization"),
        (compiled, {}, "Expected the model before that"),
        (lambda: torch.compile(Model()), {}, "Expected the model before that"),
        (Model, {"scheme": "deepnorm"}, "does not only multiply the norms"),
        (Model, {"scheme": "preln"}, "does not only multiply the norms"),
        (Model, {"scheme": None}, "Expected a text such as"),
        (Model, {"blocks": "layers"}, "expected modules, such as"),
        (Model, {"blocks": some_blocks}, "blocks= omits 1 of the 4 blocks in layers"),
        (dict, {}, "torch.nn.Module"),
    ],
)
def test_what_cannot_have_the_scheme_or_would_be_silently_wrong_is_refused_and_left_as_it_was(model, options, message):
    model = model()
    if options.get("blocks") is some_blocks:
        options = {"blocks": some_blocks(model)}
    with pytest.raises(LNSError, match=message):
        olmo_lns.apply(model, **{"example": IDS, **options})
    assert not isinstance(model, nn.Module) or not list(sites.in_model(model))


@pytest.mark.parametrize("knows_blocks", [True, False])
def test_a_scheme_that_does_more_at_the_depth_of_the_model_is_refused_before_it_is_changed(knows_blocks):
    """Of 4 blocks, this scheme makes the first one Post-LN, and of 3 blocks none."""
    model, runs = Model(), []
    model.register_forward_pre_hook(lambda module, args: runs.append(module))
    kinds = [type(module) for module in model.modules()]
    blocks = [*model.layers.values()] if knows_blocks else None
    with pytest.raises(LNSConfigError, match="mixln:alpha=0.125, which does not only multiply the norms"):
        olmo_lns.apply(model, "mixln:alpha=0.125", blocks=blocks, example=IDS)
    assert [type(module) for module in model.modules()] == kinds and not list(sites.in_model(model))
    assert bool(runs) is not knows_blocks


def test_a_norm_that_replaced_a_scaled_one_is_named():
    olmo_lns.apply(model := Model(), example=IDS)
    model.layers["1"].n2 = nn.RMSNorm(WIDTH)
    with pytest.raises(LNSError, match="block 2, layers.1.n2: this norm has no factor"):
        olmo_lns.apply(model, example=IDS)


def test_after_fsdp_it_is_refused(one_rank):
    fully_shard(model := Model())
    with pytest.raises(LNSConfigError, match="Expected the model before that"):
        olmo_lns.apply(model)
