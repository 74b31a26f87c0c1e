"""Train one arm of the papers' ViT-S table with transformers' Trainer, on a folder of images or scikit-learn's digits.

    python configs/vision/train.py configs/vision/imagenet.yaml --data FOLDER --arm lnsafterbranch -o OUT
    torchrun --nproc-per-node=8 configs/vision/train.py …
    python configs/vision/train.py configs/vision/digits.yaml --data digits --arm lns -o OUT

FOLDER has train/<class>/… and val/<class>/…. The script writes the model, its checkpoints and results.json into OUT.
results.json has the accuracy and the variance of every block's output. The extra `vision` must be installed. Pillow
and torch augment the images, because torchvision's wheel on PyPI does not load beside a torch for the CPU.

The arms have one architecture and differ in nothing else. DINOv2's class has a learned LayerScale on every branch. In
the arm `layerscale` it starts at 1e-4, as in DeiT-III. In the other arms it is frozen at 1, which is a model without
LayerScale.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from olmo_lns.diagnostics.capture import observe
from olmo_lns.diagnostics.variance import Moments
from olmo_lns.integrations.transformers import apply

#: Arm -> scheme, where LayerScale starts, ImageNet-1K accuracy of the paper's ViT-S (arXiv 2502.05795 v5, table 5).
ARMS: dict[str, tuple[str, float | None, float]] = {
    "none": ("preln", None, 67.91),
    "layerscale": ("preln", 1e-4, 70.30),
    "lns": ("lns", None, 66.43),
    "lnsafterbranch": ("preln", None, 68.75),  # the factor in LayerScale's place, where it is not trained
}
#: Held-out images of which the variances are the mean.
VARIANCE_IMAGES = 64
#: ImageNet's channel means and deviations.
MEAN, DEVIATION = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))


def build(arm: str, shape: dict[str, Any]) -> Any:
    """A fresh model of an arm. :param shape: of its ``Dinov2Config``."""
    scheme, start, _ = ARMS[arm]
    config = transformers.Dinov2Config(**shape, layerscale_value=1.0 if start is None else start)
    model = transformers.Dinov2ForImageClassification(config)
    model.dinov2.embeddings.mask_token.requires_grad_(False)  # never read outside masked-image training
    for name, parameter in model.named_parameters():
        if start is None and "layer_scale" in name:
            parameter.requires_grad_(False)
            if arm == "lnsafterbranch":
                parameter.fill_((int(re.findall(r"layers?\.(\d+)\.", name)[0]) + 1) ** -0.5)
    return model if scheme == "preln" else apply(model, scheme)


def train_view(image: Any, size: int, jitter: float) -> Any:
    """DeiT-III's: random crop, flip, one of gray, solarize and blur, color jitter."""
    view = image.resize((size, size), Image.Resampling.BICUBIC, box=_box(*image.size))
    view = ImageOps.mirror(view) if random.random() < 0.5 else view
    blur = ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))
    three = (
        lambda i: ImageOps.grayscale(i).convert("RGB"),
        lambda i: ImageOps.solarize(i, 128),
        lambda i: i.filter(blur),
    )
    view = random.choice(three)(view)
    for enhancer in random.sample([ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color], 3):
        view = enhancer(view).enhance(random.uniform(max(0.0, 1 - jitter), 1 + jitter))
    return view


def _box(width: int, height: int) -> tuple[float, float, float, float]:
    """0.08 to 1 of the area, 3/4 to 4/3 wide over high."""
    for _ in range(10):
        area, aspect = (
            width * height * random.uniform(0.08, 1.0),
            math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return 0.0, 0.0, float(width), float(height)


def held_out_view(image: Any, size: int) -> Any:
    """The middle of the image: its shorter side is all there (DeiT-III tests with a crop ratio of 1)."""
    return ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


def normalized(image: Any) -> torch.Tensor:
    """(3, height, width), float32."""
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    return ((values / 255 - MEAN) / DEVIATION).permute(2, 0, 1)


def mixed(images: torch.Tensor, labels: torch.Tensor, count: int, how: dict[str, float]) -> tuple[torch.Tensor, Any]:
    """Each batch with itself in reverse: blended (mixup) or with a rectangle pasted (CutMix), at random.

    :param how: ``mixup`` and ``cutmix``, the parameters of the Beta distributions of the shares (0: never), and
        ``label_smoothing``. :returns: images (batch, channels, size, size) and targets (batch, count), which sum to 1.
    """
    smoothing = how["label_smoothing"]
    targets = torch.nn.functional.one_hot(labels, count) * (1 - smoothing) + smoothing / count
    ways = [name for name in ("mixup", "cutmix") if how[name]]
    if not ways:
        return images, targets
    way = random.choice(ways)
    share = random.betavariate(how[way], how[way])
    if way == "mixup":
        made = share * images + (1 - share) * images.flip(0)
    else:
        height, width = images.shape[-2:]
        h, w = round(height * math.sqrt(1 - share)), round(width * math.sqrt(1 - share))
        top, left = random.randint(0, height - h), random.randint(0, width - w)
        made, place = images.clone(), (..., slice(top, top + h), slice(left, left + w))
        made[place] = images.flip(0)[place]
        share = 1 - h * w / (height * width)
    return made, share * targets + (1 - share) * targets.flip(0)


def digits() -> tuple[Any, Any, list[str]]:
    """1,437 and 360 of scikit-learn's digits in a fixed random order, 8x8, mean 0 and variance 1."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"pixel_values": images[i], "labels": int(found.target[i])} for i in order]
    return rows[:1437], rows[1437:], [str(name) for name in found.target_names]


def image_folder(folder: str, size: int, jitter: float) -> tuple[Any, Any, list[str]]:
    """Training images, held-out images, the names of the classes."""
    import datasets

    data = datasets.load_dataset("imagefolder", data_dir=folder, drop_labels=False)
    if "train" not in data or "validation" not in data or "label" not in data["train"].features:
        raise SystemExit(
            f"--data {folder}: found the splits {', '.join(data)}; expected train/<class>/… and val/<class>/…"
        )
    names, others = (data[split].features["label"].names for split in ("train", "validation"))
    if names != others:
        raise SystemExit(f"--data {folder}: {sorted(set(names) ^ set(others))[0]} is in one of train and val only")

    def with_view(rows: Any, view: Any) -> Any:
        def transform(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {
                "pixel_values": [normalized(view(i.convert("RGB"))) for i in batch["image"]],
                "labels": batch["label"],
            }

        return rows.with_transform(transform)

    train = with_view(data["train"], lambda image: train_view(image, size, jitter))
    return train, with_view(data["validation"], lambda image: held_out_view(image, size)), names


@torch.no_grad()
def block_variance(model: Any, images: torch.Tensor) -> list[float]:
    """Variance over the channels of every block's output, mean over tokens and images."""
    blocks = model.dinov2.encoder.layer
    moments = Moments(len(blocks))
    with observe(blocks, lambda block, call: moments.add(block, call.output)):
        model.eval()(pixel_values=images.to(model.device))
    return moments.columns()["variance"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="such as configs/vision/imagenet.yaml")
    parser.add_argument("--data", required=True, help="folder with train/<class>/… and val/<class>/…, or `digits`")
    parser.add_argument("--arm", required=True, choices=ARMS)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    args = parser.parse_args()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    shape, augment = config["model"], config["augment"]
    if args.data == "digits":
        train, held_out, names = digits()
    else:
        train, held_out, names = image_folder(args.data, shape["image_size"], augment["color_jitter"])

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if not model.training:
                return super().compute_loss(model, inputs, return_outputs, **kwargs)
            images, targets = mixed(inputs["pixel_values"], inputs["labels"], len(names), augment)
            return torch.nn.functional.cross_entropy(model(pixel_values=images).logits.float(), targets)

    training = transformers.TrainingArguments(
        output_dir=str(args.output), remove_unused_columns=False, label_names=["labels"], **config["training"]
    )
    transformers.set_seed(training.seed)
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    training.warmup_steps = math.ceil(len(train) / batch * config["warmup_epochs"])
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    trainer = Trainer(
        model=build(args.arm, shape | labels),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.model_accepts_loss_kwargs = False  # our loss is a mean: accumulated steps are divided by their number
    trainer.train(resume_from_checkpoint=args.resume)
    accuracy = 100 * trainer.evaluate()["eval_accuracy"]
    trainer.save_model(args.output)
    if trainer.is_world_process_zero():
        images = [held_out[i]["pixel_values"] for i in range(min(VARIANCE_IMAGES, len(held_out)))]
        variance = block_variance(trainer.model, torch.stack(images))
        result = {"arm": args.arm, "accuracy": accuracy, "variance": variance, "config": config}
        (args.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(
            f"{args.arm}: {accuracy:.1f} % of {len(held_out)} held-out images; variance {variance[0]:.3g} (block 1) to "
            f"{variance[-1]:.3g} (block {len(variance)}). The paper's ViT-S on ImageNet-1K: {ARMS[args.arm][2]} %"
        )


if __name__ == "__main__":
    main()
