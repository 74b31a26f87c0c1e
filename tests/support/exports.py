"""Save small OLMo models as OLMo saves them, and run the CLI on them in this process."""

import json
from pathlib import Path

from olmo_lns.integrations.olmo import types
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme
from support.olmo_models import build


def save_olmo(folder, *, sharded=False, optimizer=False, exponent=0.5, tokenizer=None, **changes):
    """Save a perturbed model under ``folder`` as OLMo would; returns the model."""
    import torch
    from olmo.config import TrainConfig
    from omegaconf import OmegaConf

    from olmo_lns.integrations.olmo import register

    register()
    model = build(**changes)
    folder.mkdir(parents=True)
    config = TrainConfig(model=model.config)
    if tokenizer is not None:
        config.tokenizer.identifier = str(tokenizer)
    OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")
    kind, drawn = str(model.config.layer_norm_type), types.INIT_FNS.get(str(model.config.init_fn))
    if drawn and not types.has_scheme(kind):
        Record(scaled_init=drawn).write(folder)
    if types.has_scheme(kind):
        scheme = types.scheme_of(kind)
        if "exponent" in scheme.parameters and not types.has_parameters(kind):
            scheme = Scheme.of(scheme.name, exponent=exponent)
        Record(scheme, types.base_type(kind), drawn or "plain").write(folder)
    optim = adam_state(model) if optimizer else None
    if sharded:
        save_distributed(folder / "model_and_optim", model, optim)
    else:
        torch.save(model.state_dict(), folder / "model.pt")
        if optim is not None:
            torch.save(optim, folder / "optim.pt")
            torch.save({"global_step": 3}, folder / "train.pt")
    return model


def save_distributed(folder, model, optim=None):
    """Save a distributed checkpoint of one process, with OLMo's names."""
    import torch.distributed.checkpoint as dcp

    state = {"model": model.state_dict()}
    if optim is not None:
        names = optim["param_groups"][0]["param_names"]
        state["optim"] = {"state": {names[i]: value for i, value in optim["state"].items()}}
    dcp.save(state, checkpoint_id=folder)


def adam_state(model):
    """A random state in the form of OLMo's AdamW: parameters are numbered, and their names lie beside the numbers."""
    import torch

    names = [name for name, _ in model.named_parameters()]
    generator = torch.Generator().manual_seed(3)
    state = {
        index: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn(p.shape, generator=generator),
            "exp_avg_sq": torch.rand(p.shape, generator=generator),
        }
        for index, (_, p) in enumerate(model.named_parameters())
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(len(names))), "param_names": names}
    return {"state": state, "param_groups": [group]}


def export(*args):
    """``olmo-lns export …`` in this process."""
    from olmo_lns.cli import main

    return main(["export", *map(str, args)])


def logits(model, ids):
    import torch

    with torch.no_grad():
        return model(ids).logits.double()


def relative(found, expected):
    """Largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def greedy(model, ids, steps=12):
    """Greedy continuation by repeated full forward passes: the same for every class."""
    import torch

    for _ in range(steps):
        following = logits(model, ids)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    return ids.tolist()


def load_hf(folder, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def load_olmo(folder):
    from olmo.model import OLMo

    return OLMo.from_checkpoint(str(folder))


def byte_tokenizer(path, size=64):
    """A tokenizer.json of ``size`` single-character tokens."""
    characters = [chr(32 + index) for index in range(size - 1)]
    vocabulary = {token: index for index, token in enumerate(["<eos>", *characters])}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<eos>", "special": True, **plain}],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None},
    }
    path.write_text(json.dumps(content))
    return path


class Hostile:
    """An object that runs code when a loader unpickles it unsafely."""

    def __reduce__(self):
        return print, ("this must never run",)


def refused(capsys, *args):
    """Run an export that must fail; returns its one line, having checked that nothing was written."""
    out = Path(args[1])
    before = sorted(out.parent.iterdir())
    capsys.readouterr()
    assert export(*args) == 1
    captured = capsys.readouterr()
    assert sorted(out.parent.iterdir()) == before, "something was left behind"
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err, captured.err
    assert captured.out == ""
    return captured.err
