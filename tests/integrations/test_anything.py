"""``olmo_lns.apply`` on models that no integration knows, against stock models with hooks."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.hooked import hooked
from support.other_models import IDS, MODELS, Block, Own, own
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSConfigError, LNSError


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


@pytest.mark.parametrize("wrapping", [None, _compile, _checkpoint, _shard])
@pytest.mark.parametrize("kind", MODELS)
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
    first = olmo_lns.apply(model).blocks[1].norms["a"]
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert olmo_lns.apply(model) is model and first.lns_scale == 2**-0.5
    assert (
        capfd.readouterr().err.count("LayerNorm Scaling on: 6 norms (RMSNorm, LayerNorm); s = 1 (block 1) to 0.57") == 2
    )
    with pytest.raises(LNSConfigError, match="lns already"):
        olmo_lns.apply(model, "lns:exponent=0.25")
    first.forward = lambda x: x
    with pytest.raises(LNSError):
        olmo_lns.apply(model)


def _flat():
    return nn.Sequential(nn.Embedding(96, 8), nn.Linear(8, 8))


class Functional(Block):
    """Norms that are functions."""

    def forward(self, x):
        x = x + self.mix(nn.functional.rms_norm(x, x.shape[-1:])).cumsum(1)
        return x + self.down(self.up(nn.functional.rms_norm(x, x.shape[-1:])).relu())


class OneNorm(Block):
    def forward(self, x):
        return x + self.mix(self.norms["a"](x)).cumsum(1)


class Random(Block):
    """Refuses a second call."""

    def forward(self, x):
        if hasattr(self, "ran"):
            raise RuntimeError("the cache is full")
        self.ran = True
        return super().forward(x)


def _own(kind=Block, change=None):
    model = Own()
    for block in model.blocks:
        nn.init.normal_(block.down.weight)
        block.__class__ = kind
    if change is not None:
        change(model)
    return model


def _compiled(model):
    model.compile()


def _first_quantized(model):
    model.blocks[0].mix.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    model.blocks[0].mix.forward = lambda x: x


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (_flat, {}, "found none"),
        (_own, {"example": torch.zeros(2, 3)}, "does not take the example"),
        (lambda: nn.Sequential(*(Block(8) for _ in range(2))), {}, "give example="),
        (lambda: _own(Functional), {}, "none of its modules is a norm"),
        (lambda: _own(OneNorm), {}, "one branch"),
        (lambda: _own(Random), {}, "a second time"),
        (lambda: _own().to("meta"), {}, "meta device"),
        (lambda: _own(change=_first_quantized), {}, "before quantization"),
        (lambda: _own(change=_compiled), {}, "Apply first"),
        (lambda: torch.compile(_own()), {}, "Apply first"),
        (_own, {"scheme": "deepnorm"}, "multiplies norms"),
        (_own, {"scheme": "preln"}, "multiplies norms"),
        (dict, {}, "torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_have_the_scheme_is_refused_and_left_as_it_was(model, options, message):
    model = model()
    with pytest.raises(LNSError, match=message):
        olmo_lns.apply(model, **options)
    assert not isinstance(model, nn.Module) or not list(sites.sites(model))


def test_what_a_forward_takes_may_be_given_in_four_ways():
    for example in (IDS, (IDS,), {"ids": IDS}, lambda model: model(IDS)):
        assert sum(1 for _ in sites.sites(olmo_lns.apply(_own(), example=example))) == 6


def test_after_fsdp_it_is_refused(one_rank):
    model = _own()
    fully_shard(model)
    with pytest.raises(LNSConfigError, match="Apply first"):
        olmo_lns.apply(model)
