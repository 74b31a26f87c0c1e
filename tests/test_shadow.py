"""A model gets its scheme before its weights exist: on meta, or partitioned as DeepSpeed ZeRO-3 does it."""

import pytest
import torch
from support.hooked import hooked
from support.other_models import IDS, WIDTH, Block, Model, added_in_place, own
from torch import nn

import olmo_lns
from olmo_lns import shadow, sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import any_model

NORMS = ("n1", "n2")


class Mixed(Block):
    """Attention by hand with a mask and a rotary table in buffers, and experts in one parameter.

    :param mask: what is stored; a bool that is true where a token is read, or where it is hidden, or 1.0 where hidden.
    """

    def __init__(self, number, mask="read"):
        super().__init__(number)
        read = torch.ones(8, 8).tril()
        values = {"read": read.bool(), "hidden": ~read.bool(), "hidden float": 1 - read}[mask]
        self.register_buffer("mask", values, persistent=False)
        self.hides = mask != "read"
        angles = torch.arange(8.0)[:, None] / 100.0 ** (torch.arange(WIDTH // 2) * 2 / WIDTH)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts_in = nn.Parameter(torch.randn(4, WIDTH, 48) / 6)
        self.experts_out = nn.Parameter(torch.randn(4, 48, WIDTH) / 6)

    def rotate(self, x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.table).flatten(-2)

    def forward(self, x):
        y = self.n1(x)
        scores = self.rotate(self.q(y)) @ self.rotate(self.k(y)).mT / WIDTH**0.5
        hidden = self.mask.bool() if self.hides else ~self.mask
        x = x + self.o(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.v(y))
        y = self.n2(x)
        weight, expert = self.router(y).softmax(-1).max(-1)
        outputs = torch.einsum("bti,eio->bteo", y, self.experts_in).relu()
        outputs = torch.einsum("bteo,eoi->btei", outputs, self.experts_out)
        chosen = outputs.gather(2, expert[..., None, None].expand(*expert.shape, 1, WIDTH)).squeeze(2)
        return x + weight[..., None] * chosen


def mixed(mask="read", tied=True):
    torch.manual_seed(0)
    model = Model()
    model.layers = nn.ModuleDict({key: Mixed(number, mask) for number, key in enumerate("0123")})
    if tied:
        model.head.weight = model.embedding[0].weight
    return model


def on_meta(build):
    with torch.device("meta"):
        return build()


def filled(model, stock):
    """The model with the values of ``stock``, as after ``to_empty`` and the model's own initialization."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for (name, target), (_, source) in zip(
            [*model.named_parameters(), *model.named_buffers()],
            [*stock.named_parameters(), *stock.named_buffers()],
            strict=True,
        ):
            assert target.shape == source.shape, name
            target.copy_(source)
    return model


@pytest.mark.parametrize("mask", ["read", "hidden", "hidden float"])
def test_a_model_on_meta_gets_the_factors_that_hooks_give(mask):
    model = olmo_lns.apply(on_meta(lambda: mixed(mask, tied=False)))
    assert all(parameter.is_meta for parameter in model.parameters())
    stock, reference = mixed(mask, tied=False), mixed(mask, tied=False)
    hooked(reference, reference.layers.values(), NORMS)
    torch.testing.assert_close(filled(model, stock)(IDS), reference(IDS))
    assert (stock(IDS) - reference(IDS)).abs().max() > 1e-2


def factors(model):
    return [(site.layer_number, norm.lns_scale) for _, norm, site in sites.in_model(model)]


EXPECTED = [(number, number**-0.5) for number in (1, 2, 3, 4) for _ in NORMS]


def test_apply_may_run_inside_the_meta_device_context_and_in_bf16():
    assert factors(on_meta(lambda: olmo_lns.apply(own()[0].bfloat16()))) == EXPECTED


def test_weights_that_exist_are_measured_under_a_default_device_of_meta():
    model = own()[0]
    with torch.device("meta"):
        olmo_lns.apply(model)
    assert factors(model) == EXPECTED


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_measured_under_another_default_dtype(dtype):
    model = own()[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        olmo_lns.apply(model)
    finally:
        torch.set_default_dtype(before)
    assert factors(model) == EXPECTED


def test_weights_are_measured_under_autocast():
    model = own()[0]
    with torch.autocast("cpu", torch.bfloat16):
        olmo_lns.apply(model)
    assert factors(model) == EXPECTED


def test_an_example_and_blocks_on_meta_are_taken():
    with torch.device("meta"):
        model = own()[0]
        olmo_lns.apply(model, blocks=model.layers, example=(torch.zeros(1, 6, dtype=torch.long),))
    assert factors(model) == EXPECTED


def partitioned(model):
    """The model with parameters as DeepSpeed ZeRO-3 leaves them: empty, with their shape in ``ds_shape``."""
    for parameter in model.parameters():
        shape, parameter.data = parameter.shape, torch.empty(0, dtype=parameter.dtype)
        parameter.ds_shape = shape
    return model


def test_partitioned_parameters_are_not_touched():
    model = olmo_lns.apply(partitioned(mixed()))
    assert factors(model) == EXPECTED
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def test_a_rank_with_weights_and_one_without_find_the_same_sites():
    """accelerate loads the weights in rank 0 and builds the model on meta in the others."""
    first, *others = (any_model.locate(model) for model in (mixed(), on_meta(mixed), partitioned(mixed())))
    assert first.norms == tuple(tuple(f"layers.{i}.{name}" for name in NORMS) for i in range(4))
    assert others == [first, first]


def storage(model):
    """Bytes of the parameters' memory, each storage once."""
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


def test_a_shadow_takes_the_memory_of_its_largest_parameters():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)) for _ in range(24)))
    copied = shadow.runnable_copy(model)
    largest = 4 * 1024 * 4096
    assert storage(copied) < 2 * largest + 2e6  # one for each width, and the biases
    first, second = copied[0][0].weight.detach(), copied[1][0].weight.detach()
    assert first.shape == (4096, 1024) and not torch.equal(first, second)
    assert 0.8 / 32 < float(first.std()) < 1.2 / 32


def test_tied_parameters_stay_tied_and_buffers_have_values():
    copied = shadow.runnable_copy(on_meta(mixed))
    assert copied.head.weight is copied.embedding[0].weight
    assert not any(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))


def without_norms(self, x):
    return self.n2(x + self.mlp(self.n1(x + self.attn(x))))


def test_what_is_refused_with_weights_is_refused_without_and_left_as_it_was():
    model, other = on_meta(lambda: Model(without_norms)), on_meta(Model)
    with pytest.raises(LNSConfigError, match="block 1 .* is not Pre-LN"):
        olmo_lns.apply(model)
    with pytest.raises(LNSConfigError, match="no part of this Model"):
        olmo_lns.apply(model, blocks=other.layers)
    assert not factors(model)


def test_inference_mode_is_refused_in_a_sentence():
    model = Model(added_in_place)
    with torch.inference_mode(), pytest.raises(LNSConfigError, match="Call this function before inference mode begins"):
        olmo_lns.apply(model)
    assert not factors(model)


def test_weights_that_accelerate_keeps_elsewhere_are_no_reason_for_a_shadow():
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model := Model(added_in_place))
    with pytest.raises(LNSConfigError, match="accelerate has offloaded the weights of embedding.0"):
        olmo_lns.apply(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert factors(olmo_lns.apply(model)) == EXPECTED
