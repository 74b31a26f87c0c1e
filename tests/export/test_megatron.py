"""Checkpoints that Megatron Core itself wrote: stock Megatron loads the fold, a stock Llama runs it."""

import argparse
import os

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("psutil", reason="megatron-core writes checkpoints only with psutil")

import torch
from support import megatron_tiny as tiny
from support.exports import export, load_hf, logits, refused, relative, verify
from support.hooked import hooked
from support.megatron_checkpoints import TOKENS, arguments, as_core_0_19, load, perturbed, run, save
from support.megatron_cpu import single_process

from olmo_lns.export.open import open_model
from olmo_lns.export.torch_dist import COMMON, read


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with single_process():
        yield


#: Name -> changes of the config, of the arguments, whether layers are stacked, whether in the layout of Core 0.19.
CASES = {
    "stacked": ({}, {}, True, False),
    "numbered_gqa": ({"num_query_groups": 2}, {"layernorm_scaling_exponent": 0.25}, False, False),
    "core_0_19": ({}, {}, True, True),
    "experts": ({"num_moe_experts": 4}, {"num_experts": 4}, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_stock_megatron_and_a_stock_llama_compute_the_same(case, tmp_path, capsys):
    changes, said, stacked, newer = CASES[case]
    config = tiny.config(**changes)
    model = perturbed(config)
    root = save(tmp_path / "run", model, arguments(config, **said), stacked)
    if newer:
        as_core_0_19(root)
    expected = run(hooked(model, **{"exponent": 0.25} if "layernorm_scaling_exponent" in said else {}))
    assert export(root, tmp_path / "folded") == 0
    assert relative(run(load(tmp_path / "folded", tiny.build(config))), expected) <= 1e-5
    saved = read(tmp_path / "folded")
    assert not [name for name in vars(saved.args) if "layernorm_scaling" in name or "scaled_init" in name]
    assert not any("optimizer" in name for name in [*saved.tensors, *saved.objects, *saved.common])
    assert "nothing to fold" in refused(capsys, tmp_path / "folded", tmp_path / "again")
    if case == "experts":
        assert "num_experts=4" in refused(capsys, root, tmp_path / "hf", "--format", "hf")
        return
    assert relative(logits(open_model(root), TOKENS), expected) <= 1e-5
    assert export(root, tmp_path / "hf", "--format", "hf") == 0
    assert relative(logits(load_hf(tmp_path / "hf"), TOKENS), expected) <= 1e-5
    if case == "stacked":  # what verify compares does not depend on the layout
        assert verify(root, tmp_path / "hf") == 0 and verify(root, tmp_path / "folded") == 0


@pytest.mark.parametrize(
    ("version", "argument"), [("0.15", "apply_layernorm_1p"), ("0.20", "layernorm_zero_centered_gamma")]
)
def test_zero_centered_gains(version, argument, tmp_path):
    """The file holds gain - 1, under either name of the argument; the fold holds s·gain - 1."""
    config = tiny.config()
    plain, centered = perturbed(config), perturbed(config)
    with torch.no_grad():
        for name, parameter in centered.named_parameters():
            if "norm" in name:
                parameter.sub_(1)
    root = save(tmp_path / "run", centered, arguments(config, version, **{argument: True}))
    expected = run(hooked(plain))
    assert export(root, tmp_path / "folded") == 0 and export(root, tmp_path / "hf", "--format", "hf") == 0
    loaded = load(tmp_path / "folded", tiny.build(config))
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if "norm" in name:
                parameter.add_(1)
    assert relative(run(loaded), expected) <= 1e-5
    assert relative(logits(load_hf(tmp_path / "hf"), TOKENS), expected) <= 1e-5


def test_a_zero_centered_gain_of_16_bits_is_rounded_once(tmp_path):
    config = tiny.config()
    centered = perturbed(config)
    with torch.no_grad():
        for name, parameter in centered.named_parameters():
            if "norm" in name:
                parameter.sub_(1)
    centered.bfloat16()
    gains = [p.double() + 1 for name, p in centered.decoder.layers.named_parameters() if "norm" in name]
    root = save(tmp_path / "run", centered, arguments(config, layernorm_zero_centered_gamma=True))
    assert export(root, tmp_path / "hf", "--format", "hf") == 0 and verify(root, tmp_path / "hf") == 0
    exported = load_hf(tmp_path / "hf")
    norms = [p for name, p in exported.model.layers.named_parameters() if "norm" in name]
    assert len(gains) == len(norms) == 2 * config.num_layers
    for number, (gain, norm) in enumerate(zip(gains, norms, strict=True)):
        assert torch.equal(norm, (gain * (number // 2 + 1) ** -0.5).bfloat16())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    config = tiny.config()
    return save(tmp_path_factory.mktemp("plain") / "run", perturbed(config), arguments(config))


def again(saved, folder, change):
    """A copy of the iteration whose arguments are changed. They are in a file, as before Megatron Core 0.19."""
    folder.mkdir()
    for path in (saved / "iter_0000010").iterdir():
        os.link(path, folder / path.name)
    common = read(saved).common
    change(common)
    (folder / COMMON).unlink(missing_ok=True)
    torch.save(common, folder / COMMON)
    return folder


class Hostile:
    def __reduce__(self):
        return print, ("this must never run",)


NOT_OF_A_LLAMA = dict(
    use_rope_scaling=True, qk_layernorm=True, normalization="LayerNorm", rotary_percent=0.5, window_size=(128, 0),
    position_embedding_type="yarn", swiglu=False, add_bias_linear=True,
)  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NOT_OF_A_LLAMA.items())
def test_what_no_llama_computes_is_refused(saved, name, value, tmp_path, capsys):
    root = again(saved, tmp_path / "run", lambda common: vars(common["args"]).update({name: value}))
    assert f"{name}={value!r}" in refused(capsys, root, tmp_path / "out", "--format", "hf")


def test_arguments_that_do_not_say_it_or_are_damaged(saved, tmp_path, capsys):
    def case(name, change):
        return again(saved, tmp_path / name, change), tmp_path / "out"

    def set_to(**values):
        return lambda common: vars(common["args"]).update(values)

    assert "nothing to fold" in refused(capsys, *case("stock", set_to(layernorm_scaling=False)))
    assert export(*case("given", set_to(layernorm_scaling=False))[:1], tmp_path / "fold", "--scheme", "lns") == 0
    assert "says scheme lns" in refused(capsys, *case("two", set_to()), "--scheme", "lns:exponent=1")
    assert "Megatron supports only lns" in refused(capsys, *case("foreign", set_to()), "--scheme", "skipinit")
    assert "norm_scheme='sandwich'" in refused(capsys, *case("old", set_to(norm_scheme="sandwich")))
    assert "names the class" in refused(capsys, *case("hostile", set_to(odd=Hostile())))
    lacking = case("lacking", lambda common: common.update(args=argparse.Namespace()))
    assert "has no arguments" in refused(capsys, *lacking)
    assert "has 8 block norms in 5 layers" in refused(capsys, *case("layers", set_to(num_layers=5)))
    (tmp_path / "two" / ".metadata").unlink()
    (tmp_path / "two" / ".metadata").write_bytes(b"no pickle")
    assert "cannot be loaded" in refused(capsys, tmp_path / "two", tmp_path / "out")
