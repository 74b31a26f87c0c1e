"""``olmo_lns.fold``, ``record`` and ``require`` for any model."""

import copy
import json
import math
import re

import pytest
import torch
from support import block_kinds as kinds
from support.other_models import IDS, Model, own
from torch import nn

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, LNSError

X = torch.randn(2, 8, kinds.D, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(1, kinds.D, 6, 6, generator=torch.Generator().manual_seed(1))


class Centered(nn.RMSNorm):
    """Stores its gain less one, as Gemma's."""

    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight)


def centered(width):
    norm = Centered(width)
    nn.init.zeros_(norm.weight)
    return norm


def without_gain(width):
    return nn.RMSNorm(width, elementwise_affine=False)


def pairs(model):
    return [(attn.norm, ff.norm) for attn, ff in model.layers]


@pytest.mark.parametrize(
    ("make", "x", "options"),
    [
        (kinds.Stack, X, {}),
        (lambda: kinds.Stack(kinds.Fused), X, {}),
        (lambda: nn.Sequential(*(kinds.Pooled() for _ in range(4))), IMAGES, {}),
        (lambda: kinds.Chunks(2, 3), X, {}),
        (kinds.Pairs, X, {"norms": pairs}),
        (Model, IDS, {}),
        (lambda: Model(norm=centered), IDS, {}),
        (lambda: Model(norm=without_gain), IDS, {}),
    ],
)
def test_a_folded_model_is_stock_and_gives_the_same(make, x, options):
    torch.manual_seed(0)
    model = make()
    stock = copy.deepcopy(model)
    olmo_lns.apply(model, example=x, **{name: give(model) for name, give in options.items()})
    expected = model(x)
    assert not torch.allclose(stock(x), expected, rtol=1e-3)
    assert olmo_lns.fold(model, example=x) is model
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(stock(x), expected, rtol=1e-4, atol=1e-5)


def test_a_model_is_folded_for_another_dtype():
    torch.manual_seed(0)
    model = olmo_lns.apply(kinds.Stack(), example=X)
    expected = model(X)
    olmo_lns.fold(model, example=X, dtype=torch.bfloat16)
    assert model.layers[2].n1.weight.dtype == torch.bfloat16 and model.layers[2].qkv.weight.dtype == torch.float32
    torch.testing.assert_close(model.to(torch.bfloat16)(X.bfloat16()).float(), expected, rtol=0.05, atol=0.05)


def test_a_folded_model_without_gains_does_not_get_its_factors_twice():
    torch.manual_seed(0)
    model = olmo_lns.apply(Model(norm=without_gain), example=IDS)
    olmo_lns.fold(model, example=IDS)
    expected = model(IDS)
    for call in (olmo_lns.apply, olmo_lns.plain_initialization):
        with pytest.raises(LNSError, match="not at their start"):
            call(copy.deepcopy(model), example=IDS)
    assert torch.equal(model(IDS), expected)
    olmo_lns.apply(model, example=IDS, trained=False)  # the weights were drawn anew


def test_a_norm_that_returns_several_values_is_folded():
    torch.manual_seed(0)
    model = olmo_lns.apply(kinds.Stack(lambda: kinds.SeveralBlock(tuple)), example=X)
    expected = model(X)
    torch.testing.assert_close(olmo_lns.fold(model, example=X)(X), expected, rtol=1e-4, atol=1e-5)


def test_a_weight_that_two_blocks_share_is_not_folded_and_the_scheme_stays():
    torch.manual_seed(0)
    model = kinds.Stack()
    model.layers[1].n1.weight = model.layers[2].n1.weight
    olmo_lns.apply(model, example=X)
    expected, state = model(X), copy.deepcopy(model.state_dict())
    with pytest.raises(
        LNSError, match=r"layers\.\d\.n1 would be multiplied into a weight that layers\.\d\.n1 uses as well"
    ):
        olmo_lns.fold(model, example=X)
    assert torch.equal(model(X), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_norms_of_one_factor_may_share_their_weights():
    torch.manual_seed(0)
    model = kinds.Stack()
    for block in model.layers:
        block.n1.weight = block.n2.weight
    olmo_lns.apply(model, example=X)
    expected = model(X)
    torch.testing.assert_close(olmo_lns.fold(model, example=X)(X), expected, rtol=1e-4, atol=1e-5)


class ReadsGainElsewhere(kinds.Stack):
    """Its second output reads a norm's gain past the norm."""

    def forward(self, x):
        gain = self.layers[3].n2.weight
        return torch.ones(x.shape[:2]), super().forward(x) * gain


def test_a_model_that_reads_a_gain_elsewhere_is_not_folded_and_the_scheme_stays():
    torch.manual_seed(0)
    model = olmo_lns.apply(ReadsGainElsewhere(), example=X)
    expected = model(X)
    with pytest.raises(LNSError, match="Expected the same output as before"):
        olmo_lns.fold(model, example=X)
    assert torch.equal(model(X)[1], expected[1]) and len(list(sites.in_model(model))) == 8


def test_a_gain_that_an_unscaled_norm_has_as_well_is_not_folded():
    model = olmo_lns.apply(kinds.Stack(), example=X)
    model.memory = nn.LayerNorm(kinds.D)  # which the example does not run
    model.memory.weight = model.layers[3].n2.weight
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(
        LNSConfigError, match=r"layers\.3\.n2 would be multiplied into a weight that memory uses as well"
    ):
        olmo_lns.fold(model, example=X)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert len(list(sites.in_model(model))) == 8


class Experts(nn.Module):
    """A mixture of experts that skips those without tokens, after a norm without a gain."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(kinds.D, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(kinds.D, kinds.D), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        choice, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if bool((mask := choice == number).any()):
                y = y + mask[..., None] * expert(x)
        return y


class SparseBlock(kinds.Block):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.experts = without_gain(kinds.D), without_gain(kinds.D), Experts()
        del self.up, self.down

    def mlp(self, x):
        return self.experts(x)


def test_experts_that_the_example_skips_prevent_a_fold():
    torch.manual_seed(0)
    model = olmo_lns.apply(kinds.Stack(SparseBlock), example=X)
    many = torch.randn(64, 8, kinds.D)
    expected = model(many)
    with pytest.raises(
        LNSConfigError, match=r"does not run layers\.\d\.experts\.experts\.\d\.0.* Pass a longer example="
    ):
        olmo_lns.fold(model, example=X[:1, :1])
    torch.testing.assert_close(model(many), expected, rtol=0, atol=0)
    torch.testing.assert_close(olmo_lns.fold(model, example=many)(many), expected, rtol=1e-4, atol=1e-5)


def test_a_norm_with_a_parametrization_is_not_folded_and_the_scheme_stays():
    model = olmo_lns.apply(kinds.Stack(), example=X)
    parametrize = torch.nn.utils.parametrize
    parametrize.register_parametrization(model.layers[1].n1, "weight", nn.Tanh())
    expected = model(X)
    with pytest.raises(
        LNSConfigError, match=r"changed the class of layers\.1\.n1 to Parametrized.*Undo that change first"
    ):
        olmo_lns.fold(model, example=X)
    assert torch.equal(model(X), expected) and len(list(sites.in_model(model))) == 8


def test_what_cannot_be_folded_is_refused():
    with pytest.raises(LNSConfigError, match="nothing to fold"):
        olmo_lns.fold(kinds.Stack(), example=X)
    model = olmo_lns.apply(kinds.Stack(), example=X).to("meta")
    with pytest.raises(LNSConfigError, match="meta device"):
        olmo_lns.fold(model, example=X)
    model = olmo_lns.apply(kinds.Stack(), example=X)
    model.compile()
    with pytest.raises(LNSConfigError, match="compiled"):
        olmo_lns.fold(model, example=X)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_weights_that_accelerate_keeps_elsewhere_are_refused_by_apply_and_fold(offload, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    places = {"cpu_offload": ["cpu"], "disk_offload": [str(tmp_path), "cpu"]}[offload]
    scaled, stock = olmo_lns.apply(Model(), example=IDS), Model()
    for model, function in ((scaled, olmo_lns.fold), (stock, olmo_lns.apply)):
        model = getattr(accelerate, offload)(model, *places)
        with pytest.raises(LNSConfigError, match="accelerate has offloaded the weights"):
            function(model, example=IDS)


def test_a_model_that_accelerate_runs_on_several_devices_is_scaled_and_folded():
    hooks = pytest.importorskip("accelerate.hooks")

    def dispatched():
        model = Model()
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
        return model

    expected = olmo_lns.apply(Model(), example=IDS)(IDS)
    model = olmo_lns.apply(dispatched(), example=IDS)
    torch.testing.assert_close(model(IDS), expected)
    olmo_lns.fold(model, example=IDS)
    torch.testing.assert_close(model(IDS), expected, rtol=1e-4, atol=1e-5)
    stock = Model()
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(stock(IDS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dispatched_first", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_hooks_of_accelerate_come_and_go_around_the_factor(dispatched_first, hooked):
    hooks = pytest.importorskip("accelerate.hooks")
    expected, model = olmo_lns.apply(Model(), example=IDS)(IDS), Model()
    for dispatches in (dispatched_first, not dispatched_first):
        if dispatches:
            for module in model.modules():
                if list(module.parameters(recurse=False)):
                    hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
        else:
            olmo_lns.apply(model, example=IDS)
    record = olmo_lns.record(model)
    if not hooked:
        hooks.remove_hook_from_submodules(model)
    torch.testing.assert_close(model(IDS), expected)
    assert olmo_lns.record(model) == record and len(record["norms"]) > 0
    olmo_lns.fold(model, example=IDS)
    hooks.remove_hook_from_submodules(model)
    torch.testing.assert_close(model(IDS), expected, rtol=1e-4, atol=1e-5)


def test_a_record_survives_json_and_wrappers():
    model = olmo_lns.apply(kinds.Stack(), "lns:exponent=0.25", example=X)
    saved = json.loads(json.dumps(olmo_lns.record(model)))
    assert saved["scheme"] == "lns:exponent=0.25" and saved["norms"]["layers.3.n2"] == 4 and len(saved["norms"]) == 8
    olmo_lns.require(model, saved)
    olmo_lns.require(torch.compile(model), saved)
    assert olmo_lns.record(kinds.Stack()) == {"scheme": "preln", "norms": {}}
    olmo_lns.require(kinds.Stack(), olmo_lns.record(kinds.Stack()))


@pytest.mark.parametrize(
    ("running", "saved", "error", "message"),
    [
        (
            lambda: kinds.Stack(),
            lambda: olmo_lns.apply(kinds.Stack(), example=X),
            CheckpointMismatchError,
            "olmo_lns.apply",
        ),
        (lambda: olmo_lns.apply(kinds.Stack(), example=X), lambda: kinds.Stack(), CheckpointMismatchError, "without"),
        (
            lambda: olmo_lns.apply(kinds.Stack(), example=X),
            lambda: olmo_lns.apply(kinds.Stack(), "lns:exponent=0.25", example=X),
            CheckpointMismatchError,
            "0.25",
        ),
        (
            lambda: olmo_lns.apply(kinds.Stack(), example=X),
            lambda: olmo_lns.apply(kinds.Stack(count=5), example=X),
            LNSConfigError,
            "names 10 norms, but this .* has 8.*another model",
        ),
    ],
)
def test_a_record_of_something_else_is_refused(running, saved, error, message):
    with pytest.raises(error, match=message):
        olmo_lns.require(running(), olmo_lns.record(saved()))


@pytest.mark.parametrize("saved", [None, {}, "lns", {"scheme": "lns"}])
def test_a_value_that_is_no_record_is_refused(saved):
    with pytest.raises(LNSConfigError, match="expects the value that"):
        olmo_lns.require(kinds.Stack(), saved)


def test_a_model_with_a_replaced_norm_has_no_record():
    model = olmo_lns.apply(kinds.Stack(), example=X)
    model.layers[2].n1 = nn.LayerNorm(kinds.D)
    with pytest.raises(LNSError, match="7 of its 8 sub-layers"):
        olmo_lns.record(model)


class Registered(nn.RMSNorm):
    """Keeps its subclasses by name, and requires a keyword of each."""

    classes: dict[tuple[str, str], type] = {}

    def __init_subclass__(cls, *, kind, **options):
        super().__init_subclass__(**options)
        Registered.classes[kind, cls.__name__] = cls


class Small(Registered, kind="norm"):
    pass


def test_a_registry_of_subclasses_keeps_the_stock_class():
    olmo_lns.apply(Model(norm=lambda width: Small(width)), example=IDS)
    assert Registered.classes == {("norm", "Small"): Small}
    Model(norm=Registered.classes["norm", "Small"])(IDS)


class Frozen(nn.RMSNorm):
    """Takes no new attributes after it was built."""

    def __setattr__(self, name, value):
        if "frozen" in vars(self) and name != "training":
            raise AttributeError(f"frozen: {name}")
        super().__setattr__(name, value)


def test_a_norm_that_takes_no_other_class_is_refused_by_name():
    model = Model(norm=lambda width: Frozen(width))
    for block in model.layers.values():
        vars(block.n1)["frozen"] = vars(block.n2)["frozen"] = True
    with pytest.raises(LNSError, match=r"\(Frozen\) cannot get another class and new attributes"):
        olmo_lns.apply(model, example=IDS)
    assert type(model.layers["0"].n1) is Frozen


def test_a_weight_of_nan_is_named_by_apply_and_by_fold():
    model = olmo_lns.apply(own()[0])
    broken = own()[0]
    name, weight = next((name, p) for name, p in broken.named_parameters() if p.dim() == 2 and "layers.1" in name)
    with torch.no_grad():
        weight[0, 0] = model.get_parameter(name)[0, 0] = math.nan
    for function, each in ((olmo_lns.apply, broken), (olmo_lns.fold, model)):
        with pytest.raises(LNSConfigError, match=rf"{re.escape(name)} has NaN or infinite values \(1 of"):
            function(each)
    assert not list(sites.in_model(broken)) and len(list(sites.in_model(model))) == 8
