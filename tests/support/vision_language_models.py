"""Tiny vision-language models with random weights: Qwen2.5-VL, and LLaVA, whose processor needs no torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.diagnostic_models import LAYERS, LLAMA_LIKE, VOCABULARY, grown

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'olmo-lns[hf]'")

IMAGE, LANGUAGE_LAYERS, VISION_LAYERS = 90, LAYERS, 4
_TEXT = {**LLAMA_LIKE, "max_position_embeddings": 128}


def qwen() -> Any:
    if not hasattr(transformers, "Qwen2_5_VLConfig"):
        pytest.skip("this transformers has no Qwen2.5-VL")
    rope = {"rope_type": "default", "type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    named = "rope_scaling" if transformers.__version__.startswith("4.") else "rope_parameters"
    vision = dict(
        depth=VISION_LAYERS,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        out_hidden_size=32,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=16,
        fullatt_block_indexes=[1, 3],
    )
    tokens = dict(image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    config = transformers.Qwen2_5_VLConfig(text_config={**_TEXT, named: rope}, vision_config=vision, **tokens)
    torch.manual_seed(0)
    return grown(transformers.Qwen2_5_VLForConditionalGeneration(config))


def qwen_batch(text: int = 9, seed: int = 1) -> dict[str, torch.Tensor]:
    """One record: three words, an image of 4 x 4 patches (four tokens), more words."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 80, (1, 5 + text), generator=generator)
    ids[0, 2], ids[0, 3:7], ids[0, 7] = 92, IMAGE, 93
    made = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(16, 3 * 2 * 16, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    if not transformers.__version__.startswith("4."):
        made["mm_token_type_ids"] = (ids == IMAGE).int()
    return made


def llava_folder(folder: Path) -> Path:
    """Model, tokenizer and processor, saved."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=VISION_LAYERS, num_attention_heads=4, image_size=16, patch_size=8)  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    grown(transformers.LlavaForConditionalGeneration(config)).save_pretrained(folder)
    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {f"w{i}": i for i in range(3, VOCABULARY) if i != IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words | {"<image>": IMAGE}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    special = dict(eos_token="[EOS]", pad_token="[PAD]", unk_token="[UNK]", extra_special_tokens={"image_token": "<image>"})  # fmt: skip
    size = dict(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    transformers.LlavaProcessor(
        image_processor=transformers.AutoImageProcessor.for_model("clip", **size)
        if hasattr(transformers.AutoImageProcessor, "for_model")
        else _clip_processor(**size),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **special
        ),
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def _clip_processor(**options: Any) -> Any:
    pillow = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    return pillow(**options)


def picture_records(folder: Path, count: int = 3) -> Path:
    """JSON lines with text and image files beside them."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    lines = []
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(folder / f"{number}.png")
        text = " ".join(f"w{i}" for i in rng.integers(3, 80, 6))
        lines.append(json.dumps({"image": f"{number}.png", "text": text}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "records.jsonl"
