"""The four arms of the papers' ViT-S table, as one architecture that differs in nothing else.

DINOv2's class has a learned LayerScale on every branch. The arm ``layerscale`` starts it at 1e-4,
as DeiT-III does; in the others it is 1 and frozen, which is a model without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

__all__ = ["ARMS", "Arm", "build"]


@dataclass(frozen=True)
class Arm:
    """:param label: in table and figure. :param scheme: of the blocks. :param layer_scale: its start, None: none.

    :param published: ImageNet-1K accuracy of ViT-S in percent, arXiv 2502.05795 v5, table 5.
    """

    label: str
    scheme: str
    layer_scale: float | None
    published: float


ARMS: Mapping[str, Arm] = {
    "none": Arm("Pre-LN", "preln", None, 67.91),
    "layerscale": Arm("Pre-LN + LayerScale", "preln", 1e-4, 70.30),
    "lns": Arm("LNS after the norm", "lns", None, 66.43),
    "lnsafterbranch": Arm("LNS after Attn/MLP", "lnsafterbranch", None, 68.75),
}


def build(arm: Arm, shape: Mapping[str, Any]) -> Any:
    """A fresh model of an arm. :param shape: of its ``Dinov2Config``.

    :raises LNSConfigError: an arm whose scheme is unknown.
    """
    from transformers import Dinov2Config, Dinov2ForImageClassification

    from olmo_lns.integrations.transformers import apply

    start = 1.0 if arm.layer_scale is None else arm.layer_scale
    model = Dinov2ForImageClassification(Dinov2Config(**shape, layerscale_value=start))
    # Never read outside masked-image training.
    model.dinov2.embeddings.mask_token.requires_grad_(False)
    if arm.layer_scale is None:
        for name, parameter in model.named_parameters():
            if "layer_scale" in name:
                parameter.requires_grad_(False)
    return model if arm.scheme == "preln" else apply(model, arm.scheme)
