"""Vision-language models: the language decoder is scaled, the vision tower is Megatron's own."""

import copy
import functools
from unittest import mock

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.integrations.megatron import apply

TOWER_BLOCKS = 2


def llava(cfg, tower):
    """As pretrain_vlm.py builds it: CLIP before a GPT."""
    from megatron.core.models.multimodal import llava_model
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.multimodal.llava_spec import decoder_model_with_local_default_spec
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    language = decoder_model_with_local_default_spec(None, False)
    torch.manual_seed(1)
    options = dict(
        language_transformer_config=cfg, language_transformer_layer_spec=language, language_vocab_size=tiny.VOCAB,
        language_max_sequence_length=64, language_position_embedding_type="rope",
        vision_transformer_config=tower, vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        vision_projection_config=copy.deepcopy(cfg),
        vision_projection_layer_spec=copy.deepcopy(tiny.parts_of_mlp(language)),
        drop_vision_class_token=False, img_h=28, img_w=28, patch_dim=14,
    )  # fmt: skip
    # Without TE the default norm of CLIP's embeddings is torch's own, which cannot take Megatron's arguments.
    clip = functools.partial(CLIPViTModel, ln_pre_impl=WrappedTorchNorm)
    with mock.patch.object(llava_model, "CLIPViTModel", clip):
        return LLaVAModel(**options)


def configs(*, scheme):
    """The config of the tower is a copy of the language model's, with its marks."""
    cfg = (tiny.under if scheme else tiny.config)(normalization="LayerNorm", init_method_std=0.1)
    tower = copy.deepcopy(cfg)
    tower.num_layers = TOWER_BLOCKS
    tower.vision_model_type = "clip"
    return cfg, tower


def test_the_language_decoder_is_scaled_and_the_vision_tower_is_megatrons_own():
    model, stock = llava(*configs(scheme=True)), llava(*configs(scheme=False))
    assert [norm.lns_sub_layers[0].layer_number for norm in tiny.scaled_norms(model)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert tiny.scaled_norms(model.vision_model) == []
    ours, theirs = model.vision_model, stock.vision_model
    image = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    for (name, a), b in zip(ours.decoder.named_parameters(), theirs.decoder.parameters(), strict=True):
        assert float(a.std()) == pytest.approx(float(b.std()), rel=0.15), name  # scaled as in stock
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(image), theirs(image))
    assert apply(stock) == 8 and tiny.scaled_norms(theirs) == []  # a built model's towers stay, too
    assert apply(theirs) == 2 * TOWER_BLOCKS  # unless one is named
