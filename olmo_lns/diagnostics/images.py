"""Records with images for vision-language models, one a batch, made into inputs by the model's own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

import torch

from olmo_lns import hub
from olmo_lns.diagnostics.data import DataOptions, _data_set, _json_lines
from olmo_lns.errors import LNSError, one_line

__all__ = ["load_processor", "read_images"]


def load_processor(name: str) -> Any:
    """The processor of a folder or hub name.

    :raises LNSError: it cannot be loaded; Qwen's needs torchvision.
    """
    try:
        import transformers

        known = hub.cached_only(name, "processor_config.json", "preprocessor_config.json")
        return transformers.AutoProcessor.from_pretrained(name, local_files_only=known)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LNSError(f"{name}: no processor could be loaded ({one_line(error)}); see --processor") from error


def read_images(source: str, options: DataOptions, processor: Any, field: str) -> Iterator[dict[str, torch.Tensor]]:
    """One record a batch: images differ in size, and a processor turns larger ones into more tokens.

    :param source: JSON lines with text and image files (relative to the file), or a data set with an image column.
    :param field: where a record has its image, or its list of images.
    :raises LNSError: no record, no text or image in one, or an image that cannot be read.
    """
    path, left = Path(source), options.max_tokens
    if path.is_file() and path.suffix not in (".jsonl", ".json"):
        raise LNSError(f"--data: {path} has no images: give JSON lines with {field!r} and text, or a data set")
    records: Iterable[Any] = _json_lines(path) if path.is_file() else _data_set(source)
    empty = True
    for record in records:
        pictures = _images(record, field, path.parent if path.is_file() else Path())
        text = record.get(options.text_field)
        if not isinstance(text, str) or not pictures:
            raise LNSError(
                f"--data: found a record with {sorted(record)}, expected text in {options.text_field!r} (--text-field) "
                f"and an image in {field!r} (--image-field)"
            )
        batch = dict(processor(text=_prompt(processor, text, len(pictures)), images=pictures, return_tensors="pt"))
        empty = False
        yield batch
        if left is not None and (left := left - batch["input_ids"].numel()) <= 0:
            return
    if empty:
        raise LNSError(f"{source} holds no record: give at least one with text and an image")


def _images(record: Any, field: str, folder: Path) -> list[Any]:
    from PIL import Image

    value = record.get(field) if isinstance(record, Mapping) else None
    found = value if isinstance(value, list) else [value] if value is not None else []
    try:
        return [(Image.open(folder / item) if isinstance(item, str) else item).convert("RGB") for item in found]
    except (OSError, AttributeError) as error:
        raise LNSError(f"--data: {field!r}: not an image that can be read: {one_line(error)}") from error


def _prompt(processor: Any, text: str, count: int) -> str:
    """The text with a place for each image: as it stands, by the chat template, or with the token in front."""
    token = str(getattr(processor, "image_token", "<image>"))
    if token in text:
        return text
    if getattr(processor, "chat_template", None):
        pictures = [{"type": "image"} for _ in range(count)]
        answer = {"role": "assistant", "content": [{"type": "text", "text": text}]}
        return str(processor.apply_chat_template([{"role": "user", "content": pictures}, answer]))
    return f"{token * count} {text}"
