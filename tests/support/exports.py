"""Save small OLMo models as OLMo saves them, and run the CLI on them in this process."""

from pathlib import Path

from support.olmo_models import build


def save_olmo(folder, *, sharded=False, tokenizer=None, dtype=None, **changes):
    """Save a perturbed model under ``folder`` as OLMo would; returns the model."""
    import torch
    import torch.distributed.checkpoint as dcp
    from olmo.config import TrainConfig
    from omegaconf import OmegaConf

    from olmo_lns.integrations.olmo import register

    register()
    model = build(**changes).to(dtype=dtype)
    folder.mkdir(parents=True)
    config = TrainConfig(model=model.config)
    config.tokenizer.identifier = str(tokenizer or "none.json")
    OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")
    if sharded:
        moments = {"state": {"transformer.wte.weight": {"exp_avg": torch.ones(2)}}}
        dcp.save(
            {"model": model.state_dict(), "optim": moments}, checkpoint_id=folder / "model_and_optim", no_dist=True
        )
    else:
        torch.save(model.state_dict(), folder / "model.pt")
    return model


def export(*args):
    """``olmo-lns export …`` in this process."""
    from olmo_lns.cli import main

    return main(["export", *map(str, args)])


def verify(*args):
    """``olmo-lns verify …`` in this process, on prompts of 16 tokens."""
    from olmo_lns.cli import main

    return main(["verify", *map(str, args), "--length", "16"])


def logits(model, ids):
    import torch

    with torch.no_grad():
        output = model(ids)
    return getattr(output, "logits", output).double()


def relative(found, expected):
    """Largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def load_hf(folder, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def load_olmo(folder):
    from olmo.model import OLMo

    return OLMo.from_checkpoint(str(folder))


def byte_tokenizer(path, size=64):
    """A tokenizer.json of ``size`` single-character tokens."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<eos>": 0} | {chr(31 + index): index for index in range(1, size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path))
    return path


def refused(capsys, *args):
    """Run an export that must fail; returns its one line, having checked that nothing was written."""
    out = Path(args[1])
    before = sorted(out.parent.iterdir())
    capsys.readouterr()
    assert export(*args) == 1
    captured = capsys.readouterr()
    assert sorted(out.parent.iterdir()) == before, "something was left behind"
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("olmo-lns export: ") and captured.out == ""
    return line
