"""``olmo-lns vision train``: one arm on a folder of images, by transformers' Trainer."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml

from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.vision.arms import ARMS, build
from olmo_lns.vision.augment import Mixing, held_out_view, normalised, train_view
from olmo_lns.vision.digits import block_variance

__all__ = ["Recipe", "run"]

_SECTIONS: dict[str, Any] = {"model": dict, "augment": dict, "warmup_epochs": (int, float), "training": dict}
_AUGMENT = ("color_jitter", "mixup", "cutmix", "label_smoothing")
#: Images of which the variances are taken.
VARIANCE_IMAGES = 64


class Recipe:
    """A config file. :raises LNSConfigError: another form than ``configs/vision/imagenet.yaml`` has."""

    def __init__(self, path: Path) -> None:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise LNSConfigError(f"{path} cannot be read: {one_line(error)}") from error
        if not isinstance(values, dict) or set(values) != set(_SECTIONS):
            found = ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__
            raise LNSConfigError(f"{path}: found {found}; expected the sections {', '.join(_SECTIONS)}")
        for name, kind in _SECTIONS.items():
            if not isinstance(values[name], kind):
                raise LNSConfigError(f"{path}: {name} is {values[name]!r}")
        self.model, self.training = values["model"], values["training"]
        self.warmup_epochs = float(values["warmup_epochs"])
        for name in ("warmup_steps", "warmup_ratio"):
            if name in self.training:
                raise LNSConfigError(
                    f"{path}: training: {name} is {self.training[name]!r} beside warmup_epochs "
                    f"{values['warmup_epochs']!r}; the warm-up is given in epochs: leave {name} out"
                )
        augment = values["augment"]
        for name in set(augment) ^ set(_AUGMENT):
            raise LNSConfigError(
                f"{path}: augment: {name}{did_you_mean(name, _AUGMENT)}: it takes {', '.join(_AUGMENT)}"
            )
        self.jitter = float(augment["color_jitter"])
        self.mixing = Mixing(float(augment["mixup"]), float(augment["cutmix"]), float(augment["label_smoothing"]))
        self.size = int(self.model.get("image_size", 224))


def run(args: argparse.Namespace) -> int:
    """Train, judge on the held-out images, write model and ``results.json``.

    :raises LNSConfigError: a config, an arm or a folder that is not as expected, or a missing package.
    """
    if args.arm not in ARMS:
        raise LNSConfigError(f"--arm: unknown {args.arm!r}: expected one of {', '.join(ARMS)}")
    recipe = Recipe(args.config)
    data = _images(args.data, recipe)
    names = data["train"].features["label"].names
    trainer = _trainer(args, recipe, data, names)
    if args.resume and not any(args.output.glob("checkpoint-*")):
        raise LNSConfigError(f"--resume: {args.output} holds no checkpoint-*: leave it out to start")
    trainer.train(resume_from_checkpoint=args.resume)
    scores = trainer.evaluate()
    trainer.save_model(args.output)
    if not trainer.is_world_process_zero():
        return 0
    held_out = data["validation"].select(range(min(VARIANCE_IMAGES, len(data["validation"]))))
    images = torch.stack([row["pixel_values"] for row in held_out])
    variance = block_variance(trainer.model.eval(), images.to(trainer.model.device))
    accuracy = 100 * scores["eval_accuracy"]
    content = {"arm": args.arm, "accuracy": accuracy, "loss": scores["eval_loss"], "variance": variance}
    content |= {"images": {split: len(rows) for split, rows in data.items()}, "config": str(args.config)}
    (args.output / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shown = f"{ARMS[args.arm].label}: {accuracy:.2f} % of {len(data['validation'])} held-out images"
    print(f"{shown}; variance {variance[0]:.3g} (block 1) to {variance[-1]:.3g} (block {len(variance)})")
    return 0


def _images(folder: Path, recipe: Recipe) -> Any:
    """``train`` and ``validation`` of an image folder, with the views that the model sees."""
    try:
        import datasets
    except ImportError as error:
        raise LNSConfigError(f"datasets cannot be imported ({error}): pip install 'olmo-lns[vision]'") from error
    try:
        data = datasets.load_dataset("imagefolder", data_dir=str(folder), drop_labels=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise LNSConfigError(f"--data {folder}: no folder of images: {one_line(error)}") from error
    if "train" not in data or "validation" not in data or "label" not in data["train"].features:
        raise LNSConfigError(
            f"--data {folder}: found the splits {', '.join(data)}; expected train/<class>/… and val/<class>/…"
        )
    classes = {split: data[split].features["label"].names for split in ("train", "validation")}
    if classes["train"] != classes["validation"]:
        odd = sorted(set(classes["train"]) ^ set(classes["validation"]))
        raise LNSConfigError(f"--data {folder}: train and val have other classes: {odd[0]} is in one of them only")

    def views(view: Any) -> Any:
        def transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {
                "pixel_values": [normalised(view(image.convert("RGB"))) for image in rows["image"]],
                "labels": rows["label"],
            }

        return transform

    data["train"].set_transform(views(lambda image: train_view(image, recipe.size, recipe.jitter)))
    data["validation"].set_transform(views(lambda image: held_out_view(image, recipe.size)))
    return data


def _trainer(args: argparse.Namespace, recipe: Recipe, data: Any, names: list[str]) -> Any:
    import transformers

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if not model.training:
                return super().compute_loss(model, inputs, return_outputs, **kwargs)
            images, targets = recipe.mixing(inputs["pixel_values"], inputs["labels"], len(names))
            return torch.nn.functional.cross_entropy(model(pixel_values=images).logits.float(), targets)

    try:
        training = transformers.TrainingArguments(
            output_dir=str(args.output), remove_unused_columns=False, label_names=["labels"], **recipe.training
        )
        transformers.set_seed(training.seed)
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        model = build(ARMS[args.arm], {**recipe.model, **labels})
    except (TypeError, ValueError, ImportError) as error:
        raise LNSConfigError(f"{args.config}: {one_line(error)}") from error
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    training.warmup_steps = math.ceil(len(data["train"]) / batch * recipe.warmup_epochs)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.model_accepts_loss_kwargs = False  # our loss is a mean: accumulated steps are to be divided by their number
    return trainer
