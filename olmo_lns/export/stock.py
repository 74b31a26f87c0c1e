"""Open an export as somebody without this package would: in stock transformers, or in stock OLMo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.integrations.autoload import DISABLE

__all__ = ["StockOLMo", "open_export"]

_PROGRAM = Path(__file__).with_name("stock_olmo.py")


@dataclass(frozen=True)
class StockOLMo:
    """An OLMo export, run in a process of its own in which this package's plugin is not loaded.

    :param dtype: what the weights are run in.
    """

    folder: Path
    dtype: torch.dtype

    def run(self, batches: torch.Tensor) -> list[tuple[torch.Tensor, str | None]]:
        """For each row of ``batches`` (int64, (count, length)) its logits in float32, (1, length, embeddings), and the
        first module whose output is not finite.

        :raises LNSConfigError: stock OLMo cannot load the folder, or ended.
        """
        # The program's text, not its file: the folder of the file must not get on the module path.
        program = f"import sys; sys.path[:] = {sys.path!r}\n" + _PROGRAM.read_text(encoding="utf-8").replace(
            "from __future__ import annotations\n", ""
        )
        with tempfile.TemporaryDirectory() as place:
            asked, answer = Path(place, "ids.pt"), Path(place, "logits.pt")
            torch.save(batches, asked)
            arguments = [str(self.folder), str(self.dtype).removeprefix("torch."), str(asked), str(answer)]
            command = [sys.executable, "-c", program, *arguments]
            environment = {**os.environ, DISABLE: "1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if not answer.is_file():
                raise LNSConfigError(f"{self.folder}: stock OLMo ended with exit code {done.returncode}")
            found: Any = torch.load(answer, weights_only=True)
        if isinstance(found, str):
            raise LNSConfigError(f"{self.folder}: stock OLMo cannot run it: {one_line(found)}")
        return list(found)


def open_export(folder: Path) -> tuple[Any, int, int]:
    """The export in stock code, its number of tokens and the longest prompt that it takes.

    :raises LNSConfigError: no export, or one that stock software cannot run, or would run without the factor.
    """
    from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint, is_olmo_core

    if not folder.is_dir():
        raise LNSConfigError(f"{folder} is not a folder: give what olmo-lns export made of the checkpoint")
    if is_olmo_core(folder):
        from olmo_lns.models.loading import open_olmo_core

        core = OLMoCoreCheckpoint.open(folder)
        if core.record.active:
            raise LNSConfigError(
                f"{folder} is an OLMo-core checkpoint with our block, not an export: expected what olmo-lns "
                "export made of one (usage: olmo-lns verify CHECKPOINT EXPORT)"
            )
        model = open_olmo_core(folder).to(next(iter(core.tensors.values())).dtype)
        return model, model.vocab_size, 1 << 30
    if (folder / "config.json").is_file():
        return _transformers(folder)
    if (folder / "config.yaml").is_file():
        from olmo_lns.checkpoints.olmo import OLMoCheckpoint
        from olmo_lns.export import fold
        from olmo_lns.models.loading import open_olmo

        checkpoint = OLMoCheckpoint.open(folder)
        scheme, layers = checkpoint.record.scheme, checkpoint.architecture.n_layers
        if checkpoint.record.active and fold.obstacle(scheme, layers):
            # No stock software runs it: what there is to compare is our own model of its weights.
            loaded: Any = open_olmo(folder).to(next(iter(checkpoint.tensors.values())).dtype)
            return loaded, checkpoint.architecture.vocab_size, checkpoint.architecture.max_sequence_length
        if checkpoint.record.active:
            raise LNSConfigError(
                f"{folder} is an LNS checkpoint, which stock OLMo cannot run: expected what olmo-lns export made of "
                "one (usage: olmo-lns verify CHECKPOINT EXPORT)"
            )
        model, dtype = checkpoint.architecture, next(iter(checkpoint.tensors.values())).dtype
        return StockOLMo(folder, dtype), model.vocab_size, model.max_sequence_length
    raise LNSConfigError(
        f"{folder} holds neither config.json nor config.yaml: verify reads Hugging Face, OLMo and OLMo-core exports "
        "(a folded Megatron checkpoint can be exported with --format hf and verified so)"
    )


def _transformers(folder: Path) -> tuple[Any, int, int]:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    from olmo_lns.export import transformers_folder

    if transformers_folder.is_ours(folder):
        # Brought in by `hf import`: no stock software runs it, and it refuses to try.
        model = transformers_folder.load(folder).eval()
        return model, getattr(model.config, "vocab_size", 0), getattr(model.config, "max_position_embeddings", 0)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("lns", "folded") != "folded":
            raise LNSConfigError(
                f"{folder}/config.json says lns: {config['lns']!r}, which stock transformers drops: expected an export"
            )
        how = {"torch_dtype": "auto", "local_files_only": True, "trust_remote_code": False}
        images = any(name.endswith("ForImageClassification") for name in config.get("architectures") or [])
        model = (AutoModelForImageClassification if images else AutoModelForCausalLM).from_pretrained(folder, **how)
        model = model.eval()
    except LNSConfigError:
        raise
    except Exception as error:  # transformers raises almost anything for a folder that it cannot load
        raise LNSConfigError(f"{folder}: stock transformers cannot load it: {one_line(error)}") from None
    if not type(model).__module__.startswith("transformers."):
        raise LNSConfigError(f"{folder} is a {type(model).__module__}.{type(model).__name__}, not stock transformers")
    return model, getattr(model.config, "vocab_size", 0), getattr(model.config, "max_position_embeddings", 0)
