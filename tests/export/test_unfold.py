"""Unfolding: the model computes the same function under LNS, and Adam takes the same next step."""

import json
import shutil

import pytest
import torch
from support.exports import adam_state, export, load_olmo, logits, refused, relative, save_distributed, save_olmo
from support.olmo_models import build, tokens

from olmo_lns.checkpoints.distributed import DistributedCheckpoint
from olmo_lns.export.fold import MOMENT_POWERS

IDS = tokens(batch=2, length=16)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_norm_type": "lns_rms"},
        {"layer_norm_type": "lns_default", "bias_for_layer_norm": True},
        {"layer_norm_type": "lns_default", "layer_norm_with_affine": False, "layer_norm_eps": 1e-5},
    ],
)
def test_unfolding_a_fold_restores_the_weights(tmp_path, changes, capsys):
    model = save_olmo(tmp_path / "lns", **changes)
    assert export(tmp_path / "lns", tmp_path / "folded") == 0
    assert export(tmp_path / "folded", tmp_path / "again-unsharded", "--unfold") == 0
    assert "no optimizer state: start training with --reset_optimizer_state" in capsys.readouterr().out
    again = load_olmo(tmp_path / "again-unsharded")
    assert str(again.config.layer_norm_type) == changes["layer_norm_type"]
    assert relative(logits(again, IDS), logits(model, IDS)) <= 1e-5
    for (name, before), after in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.allclose(before, after, rtol=3e-7, atol=0), name
    record = json.loads((tmp_path / "again-unsharded" / "lns.json").read_text())
    assert record["folded"] is False and record["parameters"] == {"exponent": 0.5}


def test_rescaled_moments_are_those_of_the_unfolded_models_own_step(checkpoint, folded, tmp_path):
    """The moments m, v of a folded gain g = s·w become s·m, s²·v; autograd is the reference.

    The state is that of the folded model after one backward pass. Rescaled, it must equal the state
    after the unfolded model's own backward pass.
    """
    copy = shutil.copytree(folded, tmp_path / "folded")
    torch.save(first_moments(load_olmo(copy)), copy / "optim.pt")
    assert export(copy, tmp_path / "again-unsharded", "--unfold") == 0
    found = torch.load(tmp_path / "again-unsharded" / "optim.pt", weights_only=True)
    expected = first_moments(load_olmo(checkpoint))
    assert found["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        for moment, value in state.items():
            scale = value.abs().max().clamp(min=1e-30)
            error = (found["state"][index][moment] - value).abs().max() / scale
            assert error < 1e-4, (expected["param_groups"][0]["param_names"][index], moment)


def first_moments(model):
    """Adam's state after one step from zero: m = (1-β₁)·grad, v = (1-β₂)·grad²."""
    state = adam_state(model)
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    for index, parameter in enumerate(model.parameters()):
        state["state"][index]["exp_avg"] = 0.1 * parameter.grad
        state["state"][index]["exp_avg_sq"] = state["state"][index]["max_exp_avg_sq"] = 0.05 * parameter.grad**2
    return state


def _under_ddp(config):
    from olmo.config import OptimizerType
    from olmo.model import OLMo
    from olmo.optim import build_optimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(OLMo(config.model))
    config.optimizer.name = OptimizerType.adamw
    return wrapped, build_optimizer(config, wrapped)


def test_a_ddp_run_goes_on_under_lns(folded, tmp_path, capsys):
    """OLMo itself takes a step, saves and restores the run; its optimizer names the parameters ``module.…``."""
    import torch.distributed as dist
    from olmo.checkpoint import FullCheckpointer
    from olmo.config import TrainConfig

    trained, again = tmp_path / "trained", tmp_path / "again-unsharded"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        config = TrainConfig.load(folded / "config.yaml")
        stock, optimizer = _under_ddp(config)
        stock(IDS).logits.square().mean().backward()
        optimizer.step()
        FullCheckpointer(config).save_checkpoint(trained, stock, optimizer, {"global_step": 1})
        shutil.copyfile(folded / "lns.json", trained / "lns.json")
        groups = torch.load(trained / "optim.pt", weights_only=True)["param_groups"]
        assert all(name.startswith("module.") for group in groups for name in group["param_names"])
        assert export(trained, again, "--unfold") == 0
        assert "16 moments of the optimizer rescaled" in capsys.readouterr().out
        config = TrainConfig.load(again / "config.yaml")
        model, own = _under_ddp(config)
        state = FullCheckpointer(config).restore_checkpoint(again, model, own, load_optimizer_state=True)
        assert state["global_step"] == 1 and str(model.module.config.layer_norm_type) == "lns_rms"
        assert relative(logits(model.module, IDS), logits(stock.module, IDS)) <= 1e-5
        theirs = dict(stock.module.named_parameters())
        for name, parameter in model.module.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                expected = optimizer.state[theirs[name]][moment] * factor_of(name) ** MOMENT_POWERS[moment]
                assert torch.allclose(own.state[parameter][moment], expected, rtol=1e-6), (name, moment)
    finally:
        dist.destroy_process_group()


def factor_of(name):
    return (int(name.split(".")[2]) + 1) ** -0.5 if ".blocks." in name and "norm" in name else 1.0


LOST = "transformer.blocks.2.ff_norm.weight"


def rename_one(state):
    names = state["param_groups"][0]["param_names"]
    names[names.index(LOST)] = "elsewhere.ff_norm.weight"


def of_lost(state):
    return state["state"][state["param_groups"][0]["param_names"].index(LOST)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (rename_one, f"the moments of 7 of the 8 parameters to rescale, none or not all of {LOST}'s"),
        (lambda s: of_lost(s).pop("exp_avg_sq"), f"7 of the 8 parameters to rescale, none or not all of {LOST}'s"),
        (lambda s: of_lost(s).update(hessian=torch.ones(1)), "'hessian' of unknown scaling: give --drop-optimizer"),
    ],
)
def test_moments_that_cannot_be_rescaled_stop_the_unfolding(folded, tmp_path, capsys, change, reason):
    copy = shutil.copytree(folded, tmp_path / "folded")
    state = adam_state(load_olmo(copy))
    change(state)
    torch.save(state, copy / "optim.pt")
    assert reason in refused(capsys, copy, tmp_path / "again-unsharded", "--unfold")
    assert export(copy, tmp_path / "again-unsharded", "--unfold", "--drop-optimizer") == 0
    assert "warning: the optimizer's moments were dropped as asked" in capsys.readouterr().out
    assert not (tmp_path / "again-unsharded" / "optim.pt").exists()


def test_moments_of_a_sharded_checkpoint_are_rescaled(sharded, tmp_path):
    assert export(sharded, tmp_path / "folded") == 0
    # Training went on with the folded model: its checkpoint has an optimizer again.
    model = build(layer_norm_type="lns_rms")
    state = adam_state(model)
    shutil.rmtree(tmp_path / "folded" / "model_and_optim")
    save_distributed(tmp_path / "folded" / "model_and_optim", model, state)
    assert export(tmp_path / "folded", tmp_path / "again", "--unfold") == 0
    found = DistributedCheckpoint(tmp_path / "again" / "model_and_optim")
    for index, name in enumerate(state["param_groups"][0]["param_names"]):
        for moment, value in state["state"][index].items():
            expected = value * factor_of(name) ** MOMENT_POWERS[moment]
            assert torch.allclose(found.tensor(f"optim.state.{name}.{moment}").load(), expected, rtol=1e-6), name


def test_unfolding_is_refused_without_a_fold_or_with_options_that_do_not_fit(checkpoint, folded, tmp_path, capsys):
    """Unfolding does not relabel a Pre-LN model as an LNS model."""
    save_olmo(tmp_path / "preln", layer_norm_type="rms")
    for source, options, reason in (
        (tmp_path / "preln", (), "is Pre-LN and never was LNS"),
        (checkpoint, (), "is not folded"),
        (folded, ("--exponent", "1"), "exponent 0.5; --exponent 1 is for what a checkpoint does not say"),
        (folded, ("--dtype", "bf16"), "--unfold keeps the dtype"),
    ):
        assert reason in refused(capsys, source, tmp_path / "x-unsharded", "--unfold", *options)
    assert "call it x-unsharded\n" in refused(capsys, folded, tmp_path / "x", "--unfold")
    with pytest.raises(SystemExit, match="2"):
        export(folded, tmp_path / "x-unsharded", "--unfold", "--format", "hf")
