"""LNS equals a start and a learning rate of the norm gains; each departure from the recipe changes the losses."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from olmo_lns.gains import block_gains, param_groups, rescale_state_, scale_, unscale_

WIDTH, BLOCKS, VOCABULARY = 16, 4, 11
PATTERNS = ("blocks.{}.first.weight", "blocks.{}.second.weight")


class Norm(nn.LayerNorm):
    """The norm of block l, and LNS's factor if it has one."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(WIDTH), Norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).split(WIDTH, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, lns):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()
        for number, block in enumerate(self.blocks, 1):
            block.first.factor = block.second.factor = number**-0.5 if lns else 1.0

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def pair():
    """The LNS model, the stock Pre-LN model with scaled gains, and the gains."""
    lns, stock = Model(lns=True), Model(lns=False)
    gains = block_gains(stock, *PATTERNS)
    scale_(stock, gains)
    return lns, stock, gains


def adamw(model, gains, decay=0.1, eps=1e-8):
    groups = param_groups(model, gains, lr=1e-2, weight_decay=0.1, eps=eps, vector_decay=decay)
    return torch.optim.AdamW(groups, fused=True)


def batches(steps):
    """Batches of sorted tokens, which a model can learn."""
    for step in steps:
        ids = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))
        yield ids.sort(-1).values


def train(model, optimizer, data, clip=0.0):
    losses = []
    for ids in data:
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@functools.cache
def losses_under_lns(steps, clip=0.0, eps=1e-8):
    """The losses of the LNS model, with which the tests compare a stock model."""
    model = Model(lns=True)
    return train(model, adamw(model, {}, eps=eps), batches(range(steps)), clip)


def gap(first, second):
    value = max(abs(one - other) for one, other in zip(first, second, strict=True))
    print(f"largest difference of the loss: {value:.2e}")  # pytest -s -v shows it; docs/what-lns-is.md
    return value


@pytest.mark.parametrize("eps", [1e-8, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_lns_is_a_start_of_the_gains_and_their_rate(eps):
    _, stock, gains = pair()
    before = copy.deepcopy(stock.state_dict())
    unscale_(stock, gains)
    scale_(stock, gains)
    torch.testing.assert_close(dict(stock.state_dict()), dict(before))
    losses = losses_under_lns(200, eps=eps)
    assert gap(losses, train(stock, adamw(stock, gains, eps=eps), batches(range(200)))) < 1e-10
    assert losses[-1] < losses[0] - 0.3, "nothing was learned"


def fold_in_the_middle(rescale):
    """The largest difference of the loss between a run that is folded after 50 of 100 steps and one that is not."""
    model, _, gains = pair()
    losses = train(model, before := adamw(model, {}), batches(range(50)))
    scale_(model, gains)
    for block in model.blocks:
        block.first.factor = block.second.factor = 1.0
    after = adamw(model, gains)
    after.state.update(before.state)
    if rescale:
        rescale_state_(after, model, gains)
    return gap(losses_under_lns(100), losses + train(model, after, batches(range(50, 100))))


def test_a_fold_in_the_middle_of_a_run_changes_nothing_if_the_state_is_rescaled():
    assert fold_in_the_middle(rescale=True) < 1e-10 and fold_in_the_middle(rescale=False) > 1e-5


def test_muon_trains_the_matrices_and_the_gains_stay_with_adam():
    """Both forms have the same gradients of the matrices, so that Muon makes the same steps."""
    lns, stock, found = pair()
    runs = []
    for model, gains in ((lns, {}), (stock, found)):
        matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        others = {id(parameter) for parameter in model.parameters()} - {id(parameter) for parameter in matrices}
        groups = param_groups(model, gains, lr=1e-2, weight_decay=0.1)
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in others]
        two = torch.optim.AdamW(groups), torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1)
        names = ("zero_grad", "step")
        both = SimpleNamespace(**{n: lambda n=n, two=two: [getattr(each, n)() for each in two] for n in names})
        runs.append(train(model, both, batches(range(50))))
    assert gap(*runs) < 1e-10 and runs[0][-1] < runs[0][0] - 0.3


@pytest.mark.parametrize("left_out", ["", "clipping", "decay not divided", "no decay", "eps", "rate"])
def test_each_departure_changes_the_losses(left_out):
    """One part of the recipe is left out for 100 steps; docs/what-lns-is.md has the differences."""
    _, stock, gains = pair()
    clip, eps = 0.5 if left_out == "clipping" else 0.0, 1e-4 if left_out == "eps" else 1e-8
    optimizer = adamw(stock, gains, decay=0.0 if left_out == "no decay" else 0.1, eps=eps)
    changed = {"decay not divided": ("weight_decay", 0.1), "eps": ("eps", eps), "rate": ("lr", 1e-2)}.get(left_out)
    for group in optimizer.param_groups if changed else ():
        group[changed[0]] = changed[1]
    value = gap(losses_under_lns(100, clip, eps), train(stock, optimizer, batches(range(100)), clip))
    assert value > 1e-6 if left_out else value < 1e-10


def test_blocks_of_olmo_differ_only_by_rounding():
    """OLMo's norm and rope compute in fp32 whatever the parameters are, so the two runs drift apart by rounding."""
    pytest.importorskip("olmo", reason="needs ai2-olmo (make setup)")
    from support.olmo_models import build, tokens

    lns, stock = (build(layer_norm_type=kind, perturb=False).double() for kind in ("lns_rms", "rms"))
    gains = block_gains(stock, *(f"transformer.blocks.{{}}.{name}.weight" for name in ("attn_norm", "ff_norm")))
    scale_(stock, gains)
    runs = []
    for model, groups in ((lns, {}), (stock, gains)):
        groups = param_groups(model, groups, lr=3e-3, weight_decay=0.1, vector_decay=0.1)
        optimizer = torch.optim.AdamW(groups, fused=True)
        data = (tokens(4, 17, seed=step).sort(-1).values for step in range(100))
        runs.append(train(lambda ids, model=model: model(ids).logits, optimizer, data))
    assert gap(*runs) < 2e-4 and runs[0][-1] < runs[0][0] - 1


def test_the_groups_work_with_an_optimizer_and_a_scheduler():
    _, model, gains = pair()
    groups = param_groups(model, gains, lr=1e-3, weight_decay=0.1, vector_decay=0.02, eps=1e-6)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    by_parameter = {id(p): group for group in groups for p in group["params"]}
    gain = by_parameter[id(model.blocks[3].first.bias)]
    assert {key: gain[key] for key in ("lr", "initial_lr", "weight_decay", "eps")} == pytest.approx(
        {"lr": 5e-4, "initial_lr": 5e-4, "weight_decay": 0.04, "eps": 2e-6}
    )
    matrix, final = by_parameter[id(model.blocks[3].qkv.weight)], by_parameter[id(model.norm.weight)]
    assert (matrix["lr"], matrix["weight_decay"], final["lr"], final["weight_decay"]) == (1e-3, 0.1, 1e-3, 0.02)
    optimizer = torch.optim.AdamW(groups)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert gain["lr"] == pytest.approx(2.5e-4)


def zero_centered(model):
    norm = model.blocks[0].first
    norm.forward = lambda x: (1 + norm.weight) * nn.functional.layer_norm(x, (WIDTH,))
    return model


def without(model, name):
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, None)
    return model


@pytest.mark.parametrize(
    "change, patterns, words",
    [
        (zero_centered, PATTERNS, "size 2, but 1 was expected. A zero-centered gain"),
        (lambda _: Model(lns=True), PATTERNS, r"blocks.1.first.weight of Norm.*size 0.707.* It has a factor already"),
        (
            lambda model: model,
            ["layers.{}.norm.weight"],
            r"matched the blocks \[\]. Expected one parameter in each of blocks 0 to 0",
        ),
        (lambda model: model, ["blocks.0.first.weight"], "does not have one {}"),
        (lambda model: model, ["blocks.{}.qkv.weight"], "one dimension"),
        (lambda model: model, [], "at least one pattern"),
        (
            lambda model: without(model, "blocks.1.second.weight"),
            PATTERNS,
            r"matched the blocks \[0, 2, 3\]. Expected one parameter in each of blocks 0 to 3",
        ),
        (lambda model: without(model, "blocks.3.first.bias"), PATTERNS, "4 blocks, but 3 of them with a bias"),
    ],
)
def test_gains_that_cannot_be_scaled_are_refused(change, patterns, words):
    with pytest.raises(ValueError, match=words):
        block_gains(change(Model(lns=False)), *patterns)


def test_a_missing_state_a_frozen_gain_and_a_second_scaling_are_refused():
    _, model, gains = pair()
    with pytest.raises(ValueError, match="start from their factors already"):
        scale_(model.float(), gains)
    with pytest.raises(ValueError, match="the optimizer has no exp_avg"):
        rescale_state_(adamw(model, gains), model, gains)
    model.blocks[1].first.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="blocks.1.first.weight"):
        param_groups(model, gains, lr=1.0, weight_decay=0.0)


def test_the_gains_of_a_compiled_model_are_found():
    gains = block_gains(torch.compile(Model(False)), *PATTERNS)
    assert gains["_orig_mod.blocks.2.first.weight"] == gains["_orig_mod.blocks.2.first.bias"] == 3
