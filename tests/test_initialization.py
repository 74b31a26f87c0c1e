"""Residual output projections: found by what they do, measured in a start-up line, and made plain."""

import copy
import math
import re

import pytest
import torch
import torch.distributed as dist
from support import forked
from support.other_models import IDS, WIDTH, Model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import olmo_lns
from olmo_lns import initialization
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, LNSError

HIDDEN = 3 * WIDTH


class Held(nn.Module):
    """In the place of a norm: a fixed output."""

    def __init__(self):
        super().__init__()
        self.output = torch.randn(2, 8, WIDTH)

    def forward(self, x):
        return self.output


def _attention(h):
    return torch.tril(torch.ones(8, 8)) @ h / 8


class Plain(nn.Module):
    """Attention and feed-forward, whose last matrices a subclass applies in another way."""

    found = {"o": 0, "down": 0}

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = Held(), Held()
        self.v, self.o = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.up, self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.randn(WIDTH, HIDDEN))

    def attn(self, h):
        return F.linear(_attention(F.linear(h, self.v)), self.o)

    def mlp(self, h):
        return F.linear(F.silu(F.linear(h, self.up)), self.down)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class LayerScale(Plain):
    """LayerScale, and a multiplier of the residual branch."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(2, 1, WIDTH))

    def forward(self, x):
        x = x + self.gamma[0] * self.attn(self.n1(x))
        return x + 0.2 * self.mlp(self.n2(x))


class Transposed(Plain):
    found = {"o": 1, "down": 1}

    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH))

    def attn(self, h):
        return _attention(h @ self.v) @ self.o

    def mlp(self, h):
        return F.silu(F.linear(h, self.up)) @ self.down


class Fused(Plain):
    """PaLM's: one norm, and one matrix after both branches."""

    found = {"out": 0}

    def __init__(self):
        super().__init__()
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH + HIDDEN))

    def forward(self, x):
        h = self.n1(x)
        branches = torch.cat([_attention(F.linear(h, self.v)), F.silu(F.linear(h, self.up))], dim=-1)
        return x + F.linear(branches, self.out)


class Gated(Plain):
    """The feed-forward's output is gated by the stream, as in RWKV: the gate is not linear."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def mlp(self, h):
        return torch.sigmoid(F.linear(h, self.gate)) * super().mlp(h)


class Experts(Plain):
    """A mixture of experts in parameters of three dimensions."""

    found = {"o": 0, "downs": 2}

    def __init__(self):
        super().__init__()
        self.router, self.ups = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(4, WIDTH, HIDDEN))
        self.downs = nn.Parameter(torch.randn(4, HIDDEN, WIDTH))

    def mlp(self, h):
        weights = F.linear(h, self.router).softmax(-1)
        each = torch.einsum("bte,btd,edf->btef", weights, h, self.ups)
        return torch.einsum("btef,efd->btd", F.silu(each), self.downs)


class ExpertModules(Plain):
    """Experts that are modules, of which the router selects the first two."""

    found = {"o": 0, **{f"experts.{number}.1.weight": 0 for number in range(6)}}

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(6)
        )

    def mlp(self, h):
        return self.experts[0](h) + 0.5 * self.experts[1](h)


class Expert(nn.Module):
    """Mixtral's, as wide as the stream: its three matrices have one shape."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SquareExperts(Plain):
    found = {"o": 0, **{f"experts.{number}.w2.weight": 0 for number in range(6)}}

    def __init__(self):
        super().__init__()
        self.up = self.down = None
        self.experts = nn.ModuleList(Expert() for _ in range(6))

    def mlp(self, h):
        return self.experts[1](h) + 0.5 * self.experts[2](h) + 0.2 * self.experts[5](h)


class Row(Plain):
    """A feed-forward of many square matrices, of which the last one ends the branch."""

    found = {"o": 0, "net.12.weight": 0}

    def __init__(self):
        super().__init__()
        self.up = self.down = None
        layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    def mlp(self, h):
        return self.net(h)


@pytest.mark.parametrize(
    "kind", [Plain, LayerScale, Transposed, Fused, Gated, Experts, ExpertModules, SquareExperts, Row]
)
def test_residual_output_projections_are_found_by_what_they_do(kind):
    torch.manual_seed(0)
    block, x = kind(), torch.randn(2, 8, WIDTH)
    before = copy.deepcopy(block.state_dict())
    with torch.no_grad():
        assert initialization.residual_projections(block, lambda: block(x) - x, 1e-4) == kind.found
    torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)


# Rules: how the matrices of block l of L are drawn.


def nanogpt(name, weight, number, n_layers):
    """Also llm.c, GPT-2 and OLMo's full_megatron."""
    return 0.02 / math.sqrt(2 * n_layers) if name in ("o", "down") else 0.02


def torchtitan(name, weight, number, n_layers):
    """Llama 3; its w3, which does not end a branch, is scaled too."""
    return 0.02 / math.sqrt(2 * number) if name in ("o", "down", "up") else 0.02


def open_lm(name, weight, number, n_layers):
    """Also OLMo's mitchell."""
    return weight.shape[1] ** -0.5 / (math.sqrt(2 * number) if name in ("o", "down") else 1)


def constant(name, weight, number, n_layers):
    return 0.02


def lecun(name, weight, number, n_layers):
    return weight.shape[1] ** -0.5


def zero(name, weight, number, n_layers):
    return 0.0 if name in ("o", "down") else 0.02


def wang(name, weight, number, n_layers):
    """GPT-NeoX's small_init with wang_init."""
    return 2 / (n_layers * WIDTH**0.5) if name in ("o", "down") else (2 / (5 * WIDTH)) ** 0.5


def draw(model, rule):
    torch.manual_seed(1)
    for number, block in enumerate(model.layers.values(), start=1):
        for name, child in block.named_children():
            if isinstance(child, nn.Linear):
                nn.init.normal_(child.weight, std=rule(name, child.weight, number, len(model.layers)))
            elif hasattr(child, "reset_parameters"):
                child.reset_parameters()
    return model


def wide(rule):
    """A model of 8 blocks of which the feed-forward has three times the width."""
    model = Model(keys="01234567")
    for block in model.layers.values():
        block.gate, block.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        block.down = nn.Linear(HIDDEN, WIDTH, bias=False)
    return draw(model, rule)


def stds(model):
    """Standard deviation of the two residual output projections of each block, and of all other matrices of blocks."""
    blocks = list(model.layers.values())
    last = [[getattr(block, name).weight.std().item() for block in blocks] for name in ("o", "down")]
    others = [child.weight.std().item() for block in blocks for child in (block.q, block.gate)]
    return *last, sum(others) / len(others)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            nanogpt,
            r"scaled initialization found \(o and down 0\.005\d?, others 0\.02\): call olmo_lns\.plain_initialization",
        ),
        (
            torchtitan,
            r"scaled initialization found \(o 0\.013 to 0\.005\d?, down 0\.014 to 0\.005, others 0\.02",
        ),
        (open_lm, r"scaled initialization found \(o 0\.12 to 0\.046, down 0\.073 to 0\.026, others 0\.18"),
        (constant, "scaled initialization off; measured: sites, output, gradient, initialization"),
        (lecun, "scaled initialization off; measured"),
        (zero, "scaled initialization off; measured"),
        (
            wang,
            r"initialization of the residual output projections follows no known rule \(o and down 0\.044, others 0\.11\)",
        ),
    ],
)
def test_apply_reports_the_initialization_and_changes_no_weight(rule, text, capfd):
    model = wide(rule)
    before = copy.deepcopy(model.state_dict())
    olmo_lns.apply(model)
    assert re.search(text, line := capfd.readouterr().err), line
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize(
    ("rule", "factor", "text"),
    [
        (nanogpt, lambda number: 4.0, r"o and down 0\.005\d? -> o and down 0\.02 \(times sqrt\(2L\)\)\n"),
        (
            torchtitan,
            lambda number: (2 * number) ** 0.5,
            r"-> o and \w+ and \w+ 0\.02 \(times sqrt\(2l\)\)\n",
        ),
        (open_lm, lambda number: (2 * number) ** 0.5, r"\(times sqrt\(2l\)\)\n"),
    ],
)
def test_plain_initialization_multiplies_what_is_scaled_and_nothing_else(rule, factor, text, applied, capfd):
    model = wide(rule)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for number, block in enumerate(expected.layers.values(), start=1):
            for name in ("o", "down", "up") if rule is torchtitan else ("o", "down"):
                getattr(block, name).weight.mul_(factor(number))
    assert olmo_lns.plain_initialization(olmo_lns.apply(model) if applied else model) is model
    assert re.search(text, line := capfd.readouterr().err), line
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    olmo_lns.plain_initialization(model)
    assert "plain initialization: scaled initialization was off, nothing changed" in capfd.readouterr().err
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def train(model):
    with torch.no_grad():
        model.layers["3"].n2.weight[5] += 0.1
    return model


class Inlined(Model):
    """A model without modules that run as blocks."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.layers.values():
            x = x + block.attn(block.n1(x))
            x = x + block.mlp(block.n2(x))
        return self.head(self.norm(x))


def given(model):
    return olmo_lns.apply(model, norms=[(block.n1, block.n2) for block in model.layers.values()])


def held_by_deepspeed(model):
    model.layers["3"].k.weight._hp_mapping = object()  # as after deepspeed.initialize
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: wide(wang), "follow no rule that olmo-lns knows"),
        (
            lambda: train(wide(nanogpt)),
            r"weights of its norm layers\.\*\.n2 are not at their start, so the model was trained before",
        ),
        (lambda: olmo_lns.apply(wide(nanogpt)).to("meta"), "no residual output projection could be measured"),
        (lambda: held_by_deepspeed(wide(nanogpt)), "Call it earlier"),
        (lambda: nn.Linear(4, 4), "example"),
        (lambda: given(Inlined()), "Draw these weights like all others"),
        (lambda: {"hidden_size": 4}, "found an object of the type dict. It expects a built model, or the config"),
    ],
)
def test_plain_initialization_refuses_what_it_does_not_recognize_and_changes_nothing(model, message):
    model = model()
    before = copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) else {}
    with pytest.raises(LNSConfigError, match=message):
        olmo_lns.plain_initialization(model)
    if before and not next(model.parameters()).is_meta:
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("call", [olmo_lns.apply, olmo_lns.plain_initialization])
def test_weights_may_be_drawn_after_the_projections_are_found(call):
    model = call(wide(constant).to("meta"))
    later = draw(copy.deepcopy(model).to_empty(device="cpu"), nanogpt)
    assert stds(later)[0][3] == pytest.approx(0.005, rel=0.1)
    o, down, others = stds(olmo_lns.plain_initialization(later))
    assert [*o, *down] == pytest.approx([0.02] * 16, rel=0.1) and others == pytest.approx(0.02, rel=0.1)


def test_a_matrix_that_does_not_end_a_branch_and_was_drawn_at_a_quarter_is_named_and_left_alone(capfd):
    model = draw(wide(nanogpt), lambda name, *rest: 0.005 if name == "k" else nanogpt(name, *rest))
    before = model.layers["3"].k.weight.detach().clone()
    olmo_lns.plain_initialization(model)
    assert "unchanged, since it does not end a branch: k 0.005" in capfd.readouterr().err
    assert torch.equal(model.layers["3"].k.weight, before)


def sharded(rank, world, folder, kind):
    """Each process draws its shards of a model that was sharded on the meta device, then makes them plain."""
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = olmo_lns.apply(wide(constant).to("meta"))
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    draw(model.to_empty(device="cpu"), {"nanogpt": nanogpt, "open_lm": open_lm}[kind])
    for name, parameter in model.named_parameters():
        if not name.startswith("layers."):  # empty memory may hold NaN, which equals nothing
            nn.init.ones_(parameter)
    before = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    olmo_lns.plain_initialization(model)
    for name, weight in model.state_dict().items():
        block = int(name.split(".")[1]) if name.startswith("layers.") else 0
        factor = 4.0 if kind == "nanogpt" else math.sqrt(2 * block + 2)
        projects = name.endswith(("o.weight", "down.weight"))
        torch.testing.assert_close(weight.full_tensor(), before[name] * (factor if projects else 1.0), rtol=0, atol=0)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nanogpt", "open_lm"])
def test_two_processes_make_their_shards_plain(kind, tmp_path):
    forked.run_ranks(__file__, "sharded", 2, str(tmp_path), kind)


def partition(model):
    """Leave of each matrix what DeepSpeed ZeRO-3 leaves: no elements, the full shape, and this process's shard."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() > 1:
                shard = torch.cat([parameter.detach().flatten(), torch.zeros(3)])
                left = nn.Parameter(torch.empty(0))
                left.ds_shape, left.ds_numel, left.ds_tensor = parameter.shape, parameter.numel(), shard
                left.ds_process_group = dist.group.WORLD
                setattr(module, name, left)


def test_the_shards_of_deepspeed_are_made_plain(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = olmo_lns.apply(wide(nanogpt))
        before = model.layers["2"].down.weight.detach().clone().flatten()
        partition(model)
        olmo_lns.plain_initialization(model)
        shard = model.layers["2"].down.weight.ds_tensor
        torch.testing.assert_close(shard, torch.cat([before * 4.0, torch.zeros(3)]), rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("init_fn", ["mitchell", "full_megatron"])
def test_a_built_olmo_is_made_plain(init_fn, capfd):
    pytest.importorskip("olmo")
    from support import olmo_models

    model = olmo_models.build(perturb=False, layer_norm_type="rms", init_fn=init_fn)
    before = model.transformer.blocks[1].ff_out.weight.detach().clone()
    olmo_lns.plain_initialization(model)
    factor = {"mitchell": 4.0, "full_megatron": 2.0 * len(model.transformer.blocks)}[init_fn] ** 0.5
    torch.testing.assert_close(model.transformer.blocks[1].ff_out.weight.detach(), before * factor, rtol=1e-6, atol=0)
    assert "plain initialization: " in capfd.readouterr().err


def test_gpt2_in_a_wrapper_is_reported_and_made_plain(capfd):
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_layer=8, n_embd=64, n_head=4, n_positions=16, vocab_size=96, bos_token_id=0, eos_token_id=0)
    wrapper = nn.Sequential(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    weight = wrapper[0].transformer.h[3].mlp.c_proj.weight
    before = weight.detach().clone()
    olmo_lns.apply(wrapper, example=lambda model: model[0](IDS, use_cache=False))
    assert re.search(r"scaled initialization found \(c_proj 0\.005, others 0\.02\)", capfd.readouterr().err)
    assert torch.equal(weight, before)
    olmo_lns.plain_initialization(wrapper)
    assert torch.equal(weight, before * 4.0)


# One rule for trained weights


def trained_any():
    return train(wide(constant)), lambda model: model.layers["3"].n2


def trained_olmo():
    pytest.importorskip("olmo")
    from support import olmo_models

    return olmo_models.build(perturb=True, layer_norm_type="rms"), lambda model: model.transformer.blocks[1].ff_norm


def trained_transformers():
    from support.transformers_models import stock

    return stock("llama"), lambda model: model.model.layers[1].input_layernorm


@pytest.mark.parametrize("trained", [trained_any, trained_olmo, trained_transformers])
def test_weights_that_were_trained_are_refused_unless_it_is_said(trained, monkeypatch, capfd):
    model, norm = trained()
    gain = norm(model).weight.detach().clone()
    kind = type(norm(model))
    with pytest.raises(CheckpointMismatchError, match="are not at their start.*trained=True"):
        olmo_lns.apply(model)
    assert type(norm(model)) is kind
    for options in ({"trained": True}, {"trained": False}, {}):
        if not options:
            monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "1")
        olmo_lns.apply(scaled := copy.deepcopy(model), **options)
        assert norm(scaled).lns_scale < 1 and torch.equal(norm(scaled).weight, gain)
        assert "initialization" not in capfd.readouterr().err
        olmo_lns.apply(scaled)  # measured again


def test_gains_that_are_equal_in_a_norm_and_differ_between_blocks_hold_a_factor():
    model = wide(constant)
    with torch.no_grad():
        for number, block in enumerate(model.layers.values(), start=1):
            block.n1.weight.mul_(number**-0.5)
    with pytest.raises(CheckpointMismatchError, match="its norm .*n1 are not at their start"):
        olmo_lns.apply(model)


class ImageGain(nn.Module):
    """A norm whose gain has the shape of images or of a batch, as in many vision models."""

    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:]) * self.g


def test_trained_gains_of_any_shape_are_refused():
    model = Model(norm=ImageGain)
    with torch.no_grad():
        model.layers["2"].n1.g[..., 3] += 0.1
    with pytest.raises(CheckpointMismatchError, match="its norm .*n1 are not at their start"):
        olmo_lns.apply(model)
    with pytest.raises(LNSConfigError, match="its norm .*n1 are not at their start"):
        olmo_lns.plain_initialization(model)
    olmo_lns.apply(Model(norm=ImageGain))


class WithoutGain(Model):
    """A model of blocks whose norms have no gain, as OLMo's 1B."""

    def __init__(self, **options):
        super().__init__(norm=lambda width: nn.LayerNorm(width, elementwise_affine=False), **options)


def trained_by_steps(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        logits = model(IDS)
        F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_trained_matrices_are_refused_where_norms_have_no_gain(capfd):
    model = trained_by_steps(draw(WithoutGain(), constant))
    with pytest.raises(
        CheckpointMismatchError, match=r"its matrices, such as \w+\.weight, are not independent.*trained=True"
    ):
        olmo_lns.apply(model)
    with pytest.raises(LNSConfigError, match="are not independent random numbers, so the model was trained before"):
        olmo_lns.plain_initialization(model)
    olmo_lns.apply(model, trained=True)
    assert "initialization" not in capfd.readouterr().err
    olmo_lns.apply(WithoutGain())


def fused(weight):
    """Queries, keys and values at three sizes, and padding."""
    nn.init.normal_(weight)
    with torch.no_grad():
        for number, part in enumerate(weight.chunk(4)):
            part.mul_(number)


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.normal_,
        nn.init.xavier_uniform_,
        nn.init.trunc_normal_,
        nn.init.orthogonal_,
        nn.init.eye_,
        nn.init.zeros_,
        lambda weight: nn.init.constant_(weight, 0.5),
        lambda weight: nn.init.sparse_(weight, 0.5),
        fused,
    ],
)
def test_fresh_matrices_of_any_kind_are_fresh(fill):
    torch.manual_seed(0)
    linear = nn.Linear(64, 192, dtype=torch.bfloat16 if fill is nn.init.normal_ else None)
    fill(linear.weight)
    assert not initialization.trained_part({}, initialization.matrices_of([linear]))


def test_one_structured_matrix_of_a_block_is_no_training():
    torch.manual_seed(0)
    block = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkvo"})
    block["table"] = nn.Embedding.from_pretrained(torch.arange(64.0).expand(64, 64))
    assert not initialization.trained_part({}, initialization.matrices_of([block]))


def test_a_refusal_leaves_no_marks():
    model = wide(wang)
    with pytest.raises(LNSConfigError):
        olmo_lns.plain_initialization(model)
    assert not any({"lns_matrices", "lns_norm"} & vars(module).keys() for module in model.modules())


def test_a_second_tower_is_made_plain_by_its_own_example():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = wide(nanogpt), wide(nanogpt)

    model = Towers()
    for tower in ("one", "two"):
        olmo_lns.plain_initialization(model, example=lambda model, tower=tower: getattr(model, tower)(IDS))
    for tower in (model.one, model.two):
        *projections, _ = stds(tower)
        assert all(0.017 < std < 0.023 for each in projections for std in each)


def test_a_refusal_leaves_the_marks_of_another_tower_alone():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = wide(nanogpt), wide(nanogpt)

    def marks():
        return [
            sorted({"lns_matrices", "lns_norm", "lns_sub_layers", "lns_scale"} & vars(m).keys())
            for m in model.modules()
        ]

    model = Towers()
    olmo_lns.apply(model, example=lambda model: model.one(IDS))
    before = marks()
    with torch.no_grad():
        model.two.layers["3"].n1.weight.mul_(torch.linspace(1, 2, WIDTH))
    for call in (olmo_lns.plain_initialization, olmo_lns.apply):
        with pytest.raises(LNSError, match="not at their start"):
            call(model, example=lambda model: model.two(IDS))
        assert marks() == before


@pytest.mark.parametrize("share", [lambda weight: weight, lambda weight: nn.Parameter(weight.data)])
def test_a_weight_that_two_blocks_share_is_multiplied_once(share):
    model = wide(nanogpt)
    model.layers["3"].down.weight = share(model.layers["2"].down.weight)
    expected = 4.0 * model.layers["2"].down.weight.detach()  # sqrt(2 * 8 blocks)
    olmo_lns.plain_initialization(model)
    torch.testing.assert_close(model.layers["2"].down.weight.detach(), expected)
