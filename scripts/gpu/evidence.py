#!/usr/bin/env python3
"""LNS, Pre-LN and scaled initialization on one GPU that reaches no package registry, in slices.

    python scripts/gpu/evidence.py pack FOLDER              with a registry: code and tokens into FOLDER, at most 60 MB
    python scripts/gpu/evidence.py run FOLDER OUT           on the GPU machine, again and again until it says "all done"

The runs are those of configs/study/evidence-gpu.yaml. A slice (--minutes) ends with a checkpoint. OUT/runs.csv has what
is finished; beside docs/evidence/runs.csv, docs/evidence/analysis.py reads it.
The model is OLMo's under the plugin; the loop is this file's, for OLMo's own needs packages that are not there: AdamW,
cosine, clipping and bf16 autocast as the config says. The GPU machine needs Python, numpy and torch, nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is not started as a script
import evidence_archive

STUDY = evidence_archive.ROOT / "configs" / "study" / "evidence-gpu.yaml"


def load(place: Path, name: str) -> Any:
    import numpy as np

    tokens = np.fromfile(place / f"{name}.u8", dtype=np.uint8).astype(np.int64)
    tokens[np.fromfile(place / f"{name}.ends", dtype=np.uint32)] = 256
    return tokens


class Run:
    """One run of the study in ``out/<name>``: ``curve.csv``, ``state.pt``, and at its end ``result.json``."""

    def __init__(self, entry: dict[str, Any], out: Path, place: Path) -> None:
        self.entry, self.settings, self.folder, self.place = entry, entry["settings"], out / entry["run"], place
        self.steps = int(self.settings["max_duration"])
        self.rate = float(self.settings["optimizer.learning_rate"])

    @property
    def result(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def build(self, device: Any) -> Any:
        """OLMo's model under our integration, drawn from the run's seed: the arms of a seed draw the same numbers."""
        import torch

        from olmo_lns.integrations.olmo import register

        register()
        from olmo.config import ModelConfig
        from olmo.model import OLMo

        given = {key[6:]: value for key, value in self.settings.items() if key.startswith("model.")}
        config = ModelConfig.new(**given | {"init_device": "cpu"})
        torch.manual_seed(int(self.entry["seed"]))
        return OLMo(config).to(device)

    def lr(self, step: int) -> float:
        """OLMo's cosine_with_warmup, for the update after ``step`` updates."""
        warmup, floor = int(self.settings["scheduler.t_warmup"]), float(self.settings["scheduler.alpha_f"])
        if step < warmup:
            return self.rate * step / warmup
        share = (step - warmup) / max(1, self.steps - warmup)
        return self.rate * (floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2)

    def batch(self, tokens: Any, step: int) -> Any:
        """Sequences of a step: a shuffle of all of them by the seed, none twice; the same in every arm."""
        import numpy as np
        import torch

        length, size = int(self.settings["model.max_sequence_length"]), int(self.settings["global_train_batch_size"])
        rows = len(tokens) // length
        if self.steps * size > rows:
            raise SystemExit(f"{self.entry['run']}: {self.steps * size:,} sequences, but {rows:,} packed")
        order = np.random.default_rng(int(self.entry["seed"])).permutation(rows)[step * size : (step + 1) * size]
        return torch.from_numpy(np.stack([tokens[row * length : (row + 1) * length] for row in order]))

    def train(self, tokens: Any, heldout: Any, device: Any, until: float, every: float = 60.0) -> bool:
        """Go on from the checkpoint until the end or the time ``until``; True at the end."""
        import torch

        self.folder.mkdir(parents=True, exist_ok=True)
        model = self.build(device)
        optimizer = _optimizer(model, self.settings)
        step = seconds = 0
        if (state := self.folder / "state.pt").is_file():
            saved = torch.load(state, map_location=device, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            step, seconds = saved["step"], saved["seconds"]
        curve = [row for row in _read(self.folder / "curve.csv") if int(row["step"]) <= step]
        began = saved_at = time.monotonic()
        model.train()
        while step < self.steps and time.monotonic() < until and not STOPPED:
            loss = self._step(model, optimizer, self.batch(tokens, step).to(device), step)
            step += 1
            if step % 10 == 0 or step == self.steps:
                spent = seconds + time.monotonic() - began
                curve.append({"step": step, "loss": f"{loss.item():.4f}", "seconds": f"{spent:.1f}"})
            if step % 50 == 0 or step == self.steps:
                _write(self.folder / "curve.csv", curve)
            if time.monotonic() - saved_at > every:
                self._save(model, optimizer, step, seconds + time.monotonic() - began)
                saved_at = time.monotonic()
        spent = seconds + time.monotonic() - began
        _write(self.folder / "curve.csv", curve)
        if step < self.steps:
            self._save(model, optimizer, step, spent)
            return False
        self._finish(model, heldout, device, curve, spent)
        return True

    def _step(self, model: Any, optimizer: Any, rows: Any, step: int) -> Any:
        import torch

        for group in optimizer.param_groups:
            group["lr"] = self.lr(step + 1)  # OLMo sets the rate after counting the step
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model, rows, self.settings)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(self.settings["max_grad_norm"]))
        optimizer.step()
        return loss.detach()

    def _save(self, model: Any, optimizer: Any, step: int, seconds: float) -> None:
        import torch

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
        temporary = self.folder / "state.tmp"
        torch.save(state, temporary)
        os.replace(temporary, self.folder / "state.pt")

    def _finish(self, model: Any, heldout: Any, device: Any, curve: list[dict[str, Any]], seconds: float) -> None:
        import torch

        length = int(self.settings["model.max_sequence_length"])
        rows = torch.from_numpy(heldout[: len(heldout) // length * length].reshape(-1, length))
        model.eval()
        with torch.no_grad():
            losses = [_loss(model, part.to(device), self.settings).item() * len(part) for part in rows.split(64)]
        last = [float(row["loss"]) for row in curve if int(row["step"]) > 0.95 * self.steps]
        found = {
            "heldout": sum(losses) / len(rows),
            "loss": sum(last) / len(last),
            "seconds": round(seconds, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        (self.folder / "result.json").write_text(json.dumps(found) + "\n")
        (self.folder / "state.pt").unlink(missing_ok=True)


def _loss(model: Any, rows: Any, settings: dict[str, Any]) -> Any:
    import torch

    bf16 = settings["precision"] == "amp_bf16" and rows.is_cuda
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        logits = model(rows).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())


def _optimizer(model: Any, settings: dict[str, Any]) -> Any:
    """AdamW with the config's values; matrices and embeddings decay, norms do not."""
    import torch

    if settings["optimizer.decay_norm_and_bias"] or not settings["optimizer.decay_embeddings"]:
        raise SystemExit("this loop decays matrices and embeddings and nothing else: set the config so")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    decay = float(settings["optimizer.weight_decay"])
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    betas = tuple(float(beta) for beta in settings["optimizer.betas"])
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=float(settings["optimizer.eps"]), fused=fused)


def _read(path: Path) -> list[dict[str, Any]]:
    return list(csv.DictReader(path.open(newline=""))) if path.is_file() else []


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def table(runs: Sequence[Run], out: Path, study: str) -> None:
    """``runs.csv``: the finished runs as `olmo-lns study report` reads them."""
    rows = []
    for run in runs:
        if (found := run.result) is None:
            continue
        settings = run.settings
        length = int(settings["model.max_sequence_length"]) * int(settings["global_train_batch_size"])
        entry = {key: run.entry[key] for key in ("run", "size", "arm", "seed")}
        rows.append({
            "identity": f"{study}/{entry['run']}", **entry, "parameters": found["parameters"], "status": "complete",
            "step": run.steps, "steps": run.steps, "tokens": run.steps * length, "loss": found["loss"], "loss_std": "",
            "points": 0, "last_loss": "", "cpu_s": "", "source": study, "heldout": found["heldout"],
            "layers": settings["model.n_layers"], "width": settings["model.d_model"], "learning_rate": run.rate,
        })  # fmt: skip
    _write(out / "runs.csv", rows)


STOPPED: list[int] = []


def run(folder: Path, out: Path, minutes: float, device_name: str | None) -> int:
    """One slice. :returns: 0 when all is done, 3 when another slice is needed."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    known = evidence_archive.unpack(folder, out)
    import torch

    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_float32_matmul_precision("high")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda found, _: STOPPED.append(found))
    place = out / "unpacked"
    runs = [Run(entry, out, place) for entry in known["runs"]]
    tokens, heldout = load(place, "train"), load(place, "heldout")
    while True:
        left = [each for each in runs if each.result is None]
        if not left:
            print("all done")
            return 0
        ended = left[0].train(tokens, heldout, device, began + 60 * minutes)
        table(runs, out, known["study"])
        print(f"{left[0].entry['run']}: {left[0].result if ended else 'to be continued'}", flush=True)
        if not ended:
            return 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--study", type=Path, default=STUDY)
    packing.add_argument("--tokens", type=int, default=100_000_000, help="training tokens (default 100M)")
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--minutes", type=float, default=9.0, help="of this slice (default 9)")
    running.add_argument("--device", help="default cuda where there is one")
    args = parser.parse_args(argv)
    if args.command == "pack":
        evidence_archive.pack(args.study, args.folder, args.tokens)
        return 0
    return run(args.folder, args.out, args.minutes, args.device)


if __name__ == "__main__":
    sys.exit(main())
