"""Checkpoints and hub names opened as the models that they were trained as."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from olmo_lns import environment, hub
from olmo_lns.checkpoints.olmo import OLMoCheckpoint, identifier_in, section
from olmo_lns.checkpoints.olmo_core import BUFFER, OLMoCoreCheckpoint, is_olmo_core
from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.integrations.olmo_core.config import CONFIG_FILE
from olmo_lns.models.structure import find_blocks, is_masked_lm, vocabulary_size
from olmo_lns.norm.dtypes import DTYPES


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with what the diagnostics ask of it.

    :param kind: ``"olmo"``, ``"olmo-core"`` or ``"huggingface"``. :param device: where token ids go.
    :param max_length: longest sequence it was made for. :param token_dtype: of its raw training data files.
    :param tokenizer_name: file or name of its own tokenizer, None when unknown.
    :param eos_token_id: its document end, for tokenizer files that do not say which token that is.
    """

    model: nn.Module
    blocks: list[nn.Module]
    kind: str
    device: torch.device
    vocabulary: int
    max_length: int
    tokenizer_name: str | None
    token_dtype: str = "uint16"
    eos_token_id: int | None = None

    @property
    def dtype(self) -> str:
        """Of the weights, e.g. ``float32``."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def masked_lm(self) -> bool:
        return is_masked_lm(getattr(getattr(self.model, "config", None), "model_type", None))


def pick_device(name: str) -> torch.device:
    """``auto`` takes CUDA, else MPS, else the CPU."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError:
            raise LNSError(f"--device: found {name!r}, expected auto, cpu, cuda, cuda:<n> or mps") from None
        found = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if (device.index or 0) >= found.get(device.type, 1):
            raise LNSError(f"--device {name}: found {found[device.type]} {device.type} devices here; use --device cpu")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    blocks: str | None = None,
) -> LoadedModel:
    """Load ``source`` for analysis.

    :param dtype: ``fp32``, ``bf16``, ``fp16``, or ``auto``: as saved, OLMo's in fp32.
    :param device_map: passed to Hugging Face, which then places the weights (needs accelerate).
    :param blocks: dotted path of the block list, for models outside the table.
    :raises LNSError: a folder without a config, a model that cannot be loaded, or blocks not found.
    """
    folder, place = Path(source), pick_device(device)
    olmo = (folder / "config.yaml").is_file()
    core = not olmo and is_olmo_core(folder)
    kind = "an OLMo-core" if core else "an OLMo"
    for flag, value, where, instead in (
        ("--device-map", device_map, olmo or core, "is for Hugging Face models, use --device"),
        ("--blocks", blocks, core, "is for models outside the table, and its blocks are known: leave it out"),
    ):
        if value is not None and where:
            raise LNSError(f"{source} is {kind} checkpoint: {flag} {instead}")
    if olmo:
        return _load_olmo(folder, DTYPES.get(dtype), place, blocks)
    if core:
        return _load_olmo_core(folder, DTYPES.get(dtype), place)
    if folder.exists() and not (folder / "config.json").is_file():
        raise LNSError(
            f"{source}: found neither config.yaml (an OLMo checkpoint) nor config.json (a Hugging Face model); "
            "give the folder that holds one of them"
        )
    # A hub name is `name` or `owner/name`; anything else that is not there is a mistyped path.
    if not folder.exists() and (folder.is_absolute() or source.startswith((".", "~")) or len(folder.parts) > 2):
        raise LNSError(f"{source}: no such folder; give an OLMo checkpoint, or a Hugging Face folder or hub name")
    return _load_huggingface(source, DTYPES.get(dtype), place, device_map, blocks)


def _load_olmo(folder: Path, dtype: torch.dtype | None, device: torch.device, blocks: str | None) -> LoadedModel:
    checkpoint, path = OLMoCheckpoint.open(folder), folder / "config.yaml"
    model, sizes = open_olmo(folder).to(device=device, dtype=dtype), checkpoint.architecture
    return LoadedModel(
        model=model,
        blocks=find_blocks(model, blocks),
        kind="olmo",
        device=device,
        vocabulary=vocabulary_size(model),
        max_length=sizes.max_sequence_length,
        tokenizer_name=identifier_in(checkpoint.config, path),
        token_dtype=str(section(checkpoint.config, "data", path).get("memmap_dtype") or "uint16"),
        eos_token_id=sizes.eos_token_id,
    )


def _load_olmo_core(folder: Path, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    checkpoint = OLMoCoreCheckpoint.open(folder)
    data, model = section(checkpoint.config, "dataset", path := folder / CONFIG_FILE), open_olmo_core(folder)
    saved = next(iter(checkpoint.tensors.values())).dtype
    return LoadedModel(
        model=model.to(device, dtype or saved).eval(),
        blocks=find_blocks(model),
        kind="olmo-core",
        device=device,
        vocabulary=model.vocab_size,
        max_length=int(data.get("sequence_length") or 2048),
        tokenizer_name=identifier_in(data, path),
        token_dtype=str(data.get("dtype") or "uint16"),
        eos_token_id=section(data, "tokenizer", path).get("eos_token_id"),
    )


def open_olmo(folder: Path) -> nn.Module:
    """OLMo's model on the CPU, in fp32 and evaluation mode, under the scheme that the checkpoint was trained with.

    :raises CheckpointMismatchError: the record is lost, and the config alone does not say the scheme's parameters.
    :raises LNSConfigError: the checkpoint is damaged or incomplete, or OLMo cannot build its model.
    """
    from olmo_lns.integrations.olmo import register

    register()  # first: the integration's other modules import OLMo, which would load the plugin from inside one
    from olmo.config import ModelConfig
    from olmo.exceptions import OLMoConfigurationError
    from olmo.model import OLMo

    from olmo_lns.integrations.olmo.types import check_sizes

    tensors = OLMoCheckpoint.open(folder).tensors
    path = folder / "config.yaml"
    with mock.patch.dict(os.environ, {environment.INITIALIZATION: ""}):  # of no meaning to weights that are loaded
        try:
            config = ModelConfig.load(path, key="model", validate_paths=False)
            check_sizes(config)
            config.init_device = "cpu"
            model = OLMo(config, init_params=False)
        except OLMoConfigurationError as error:
            raise LNSConfigError(f"{path}: {one_line(error)}") from None
        # Not by OLMo's own loader: that of OLMo 0.6.0 cannot read shards under torch >= 2.6.
        model.load_state_dict(model._make_state_dict_compatible({n: t.load() for n, t in tensors.items()})[0])
    return model.float().eval()


def open_olmo_core(folder: Path) -> Any:
    """The model in fp32 on the CPU, built by OLMo-core from the checkpoint's own config.

    :raises LNSConfigError: OLMo-core is not installed, or has another model.
    """
    try:
        from olmo_core.nn.transformer import TransformerConfig
    except ImportError as error:
        raise LNSConfigError(
            f"running {folder} needs OLMo-core ({error}): pip install 'olmo-lns[olmo-core]', in an environment "
            "without OLMo"
        ) from None
    checkpoint = OLMoCoreCheckpoint.open(folder)
    try:
        model = TransformerConfig.from_dict(copy.deepcopy(checkpoint.model)).build(init_device="cpu")
        state = {name: tensor.load().float() for name, tensor in checkpoint.tensors.items()}
        for index in range(len(checkpoint.blocks)):
            # Where OLMo-core keeps the factor in a buffer; those of the checkpoint were compared when it was opened.
            if (name := f"blocks.{index}.{BUFFER}") in dict(model.named_buffers()):
                state[name] = torch.tensor((index + 1) ** -0.5)
        model.load_state_dict(state)
    except LNSError:
        raise
    except Exception as error:  # OLMo-core's and torch's own, of many kinds
        raise LNSConfigError(f"{folder}: OLMo-core cannot build this model: {error}") from error
    return model.float().eval()


def _load_huggingface(
    source: str, dtype: torch.dtype | None, device: torch.device, device_map: str | None, blocks: str | None
) -> LoadedModel:
    import transformers
    from safetensors import SafetensorError

    from olmo_lns.integrations.transformers import register

    try:
        register()  # a model type of ours is found also where the autoload hook did not run
        known = {"local_files_only": hub.cached_only(source, "config.json")}
        config = transformers.AutoConfig.from_pretrained(source, **known)
        masked = is_masked_lm(config.model_type)
        loader = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
        options = {"device_map": device_map, **known} if device_map else known
        model = loader.from_pretrained(source, torch_dtype=dtype or "auto", **options)
    except LNSError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise LNSError(f"{source}: not a loadable Hugging Face model: {one_line(error)}") from error
    if not device_map:
        model = model.to(device)
    return LoadedModel(
        model=model.eval(),
        blocks=find_blocks(model, blocks),
        kind="huggingface",
        device=model.get_input_embeddings().weight.device,
        vocabulary=vocabulary_size(model),
        max_length=int(getattr(config, "max_position_embeddings", None) or 2048),
        tokenizer_name=source,
    )


def load_tokenizer(name: str | None, eos_token_id: int | None = None) -> Any:
    """A tokenizer from a ``tokenizer.json`` file, a folder or a hub name.

    :param eos_token_id: document end of a ``tokenizer.json`` file, which does not name it.
    :raises LNSError: none is known, or it cannot be loaded.
    """
    if not name:
        raise LNSError("this needs a tokenizer and the model names none: give one with --tokenizer")
    import transformers

    try:
        if Path(name).is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=name)
            if eos_token_id is not None and eos_token_id < len(tokenizer):
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token_id)
            return tokenizer
        known = hub.cached_only(name, "tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
        return transformers.AutoTokenizer.from_pretrained(name, local_files_only=known)
    except (LNSError, OSError, ValueError, KeyError, TypeError) as error:
        raise LNSError(
            f"{name}: no tokenizer could be loaded ({one_line(error)}); give one with --tokenizer, "
            "or give --data as token ids"
        ) from error
