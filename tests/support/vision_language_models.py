"""A tiny LLaVA with random weights, whose processor needs no torchvision."""

import pytest
import torch

from support.diagnostic_models import LAYERS, LLAMA_LIKE, VOCABULARY, grown

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'olmo-lns[hf]'")

IMAGE, LANGUAGE_LAYERS, VISION_LAYERS = 90, LAYERS, 4
_TEXT = {**LLAMA_LIKE, "max_position_embeddings": 128}


def llava_folder(folder):
    """Save a model, its tokenizer and its processor."""
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
    pillow = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    transformers.LlavaProcessor(
        image_processor=pillow(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **special
        ),
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder
