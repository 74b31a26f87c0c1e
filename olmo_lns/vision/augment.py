"""DeiT-III's views of an image (random crop, flip, 3-Augment, colour jitter), and mixtures of two images.

In Pillow and torch, because torchvision's wheel on PyPI is the CUDA build, which does not load beside a torch for the
CPU. Randomness is Python's: data loaders seed it for each worker.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Mixing", "held_out_view", "normalised", "train_view"]

#: ImageNet's channel means and deviations.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Of the random crop: share of the area, and its width over its height.
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
SOLARIZE_FROM, BLUR = 128, (0.1, 2.0)


def train_view(image: Any, size: int, jitter: float) -> Any:
    """A random view of ``image``, ``size`` pixels wide and high.

    :param jitter: brightness, contrast and saturation are multiplied by 1 - jitter to 1 + jitter.
    """
    from PIL import Image, ImageEnhance, ImageFilter, ImageOps

    view = image.resize((size, size), Image.Resampling.BICUBIC, box=_box(*image.size))
    if random.random() < 0.5:
        view = ImageOps.mirror(view)
    kind = random.randrange(3)
    if kind == 0:
        view = ImageOps.grayscale(view).convert("RGB")
    elif kind == 1:
        view = ImageOps.solarize(view, SOLARIZE_FROM)
    else:
        view = view.filter(ImageFilter.GaussianBlur(random.uniform(*BLUR)))
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    random.shuffle(enhancers)
    for enhancer in enhancers:
        view = enhancer(view).enhance(random.uniform(max(0.0, 1 - jitter), 1 + jitter))
    return view


def _box(width: int, height: int) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return 0.0, 0.0, float(width), float(height)


def held_out_view(image: Any, size: int) -> Any:
    """The middle of ``image``: its shorter side is all there (DeiT-III tests with a crop ratio of 1)."""
    from PIL import Image, ImageOps

    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def normalised(image: Any) -> torch.Tensor:
    """(3, height, width), float32."""
    values = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    values = values.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255
    return (values - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)


@dataclass(frozen=True)
class Mixing:
    """Each batch is mixed with itself in reverse: blended (mixup) or with a rectangle pasted (CutMix), at random.

    :param mixup: and ``cutmix``: parameters of the Beta distributions of the shares; 0: never.
    :param smoothing: of the labels.
    """

    mixup: float
    cutmix: float
    smoothing: float

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixed images (batch, 3, size, size) and their targets (batch, count), which sum to 1."""
        targets = torch.full((len(labels), count), self.smoothing / count, device=labels.device)
        targets.scatter_(1, labels[:, None], 1 - self.smoothing + self.smoothing / count)
        alphas = {self._blend: self.mixup, self._paste: self.cutmix}
        ways = [way for way, alpha in alphas.items() if alpha]
        if not ways:
            return images, targets
        way = random.choice(ways)
        mixed, share = way(images, random.betavariate(alphas[way], alphas[way]))
        return mixed, share * targets + (1 - share) * targets.flip(0)

    @staticmethod
    def _blend(images: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        return share * images + (1 - share) * images.flip(0), share

    @staticmethod
    def _paste(images: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
        height, width = images.shape[-2:]
        h, w = round(height * math.sqrt(1 - share)), round(width * math.sqrt(1 - share))
        top, left = random.randint(0, height - h), random.randint(0, width - w)
        made = images.clone()
        made[..., top : top + h, left : left + w] = images.flip(0)[..., top : top + h, left : left + w]
        return made, 1 - h * w / (height * width)
