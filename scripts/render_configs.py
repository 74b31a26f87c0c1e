#!/usr/bin/env python3
"""Render configs/olmo and configs/megatron from one table of sizes and arms.

python scripts/render_configs.py          writes the files
python scripts/render_configs.py --check  exits 1 when a committed file is not what renders

Edit this file, never the rendered ones. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "configs"
TEMPLATES = Path(__file__).resolve().parent / "templates"
BUDGET = 20_000_000_000  # tokens a run: the paper's


@dataclass(frozen=True)
class Size:
    """:param micro_batch: sequences a GPU takes at once; changes speed and memory, not the result."""

    name: str
    layers: int
    width: int
    heads: int
    inner: int
    sequence: int
    batch: int
    learning_rate: float
    warmup: int
    micro_batch: int
    sharded: bool
    origin: str
    parallel: str

    @property
    def steps(self) -> int:
        return -(-BUDGET // (self.sequence * self.batch))


ONE_GPU = "#   A100-80 / H100-80 / H200: TP 1, PP 1 (data parallel only)."
SIZES = (
    Size("60M", 8, 512, 8, 2048, 4096, 256, 6e-4, 2000, 8, False, "configs/tiny/OLMo-60M.yaml", ONE_GPU),
    Size("150M", 12, 768, 12, 3072, 4096, 256, 6e-4, 2000, 4, False, "configs/tiny/OLMo-150M.yaml", ONE_GPU),
    Size("300M", 16, 1024, 16, 4096, 4096, 256, 6e-4, 2000, 4, False, "configs/tiny/OLMo-300M.yaml", ONE_GPU),
    Size("1B", 16, 2048, 16, 8192, 2048, 512, 4e-4, 2000, 8, True, "configs/official-0724/OLMo-1B.yaml", ONE_GPU),
    Size(
        "7B", 32, 4096, 32, 11008, 2048, 1024, 3e-4, 1000, 2, True, "configs/official-0724/OLMo-7B.yaml",
        "#   A100-80 / H100-80, 8 GPUs or more: TP 2 with --sequence-parallel, PP 1. Fewer than 8: TP 4 or PP 2.\n"
        "#   H200 (141 GB), 8 GPUs or more: TP 1, PP 1.",
    ),
)  # fmt: skip

#: arm -> (what it is, OLMo layer_norm_type, OLMo init_fn, Megatron lines or None)
ARMS = {
    "preln": (
        "Pre-LN, every matrix drawn with std 0.02 (the baseline that differs from LNS in the factor only)",
        "rms",
        "normal",
        "no-scaled-init: true  # the plugin's flag: residual output projections at std 0.02, not 0.02/sqrt(2 L)",
    ),
    "preln_scaled_init": (
        "Pre-LN with scaled initialization: residual output projections at 0.02/sqrt(2 L)",
        "rms",
        "full_megatron",
        "# no arm flag: stock Megatron scales the residual output projections by 1/sqrt(2 L)",
    ),
    "lns": (
        "Pre-LN with LayerNorm Scaling: block norms times 1/sqrt(l), unscaled initialization",
        "lns_rms",
        "normal",
        "layernorm-scaling: true  # the plugin's flag: block norms times 1/sqrt(l); scaled initialization off with it",
    ),
    "preln_mitchell": (
        "Pre-LN with OLMo's own scaled init (mitchell); it changes every matrix, so it isolates nothing",
        "rms",
        "mitchell",
        None,
    ),
}
NORM_NOTE = {
    "rms": "RMSNorm with gain",
    "lns_rms": "RMSNorm times 1/sqrt(l); named in full so that the file says which norm is scaled",
}
INIT_NOTE = {
    "normal": "every matrix N(0, init_std), cut at 3 std",
    "full_megatron": "as normal, but attn_out and ff_out at init_std/sqrt(2 L), and the head at 1/sqrt(d_model)",
    "mitchell": "1/sqrt(d) and 1/sqrt(2 d l) by depth; init_std is not used",
}
DDP = """distributed_strategy: ddp
ddp:
  grad_sync_mode: batch
  find_unused_params: false
fsdp: null
save_interval: null  # sharded checkpoints are fsdp's
save_interval_unsharded: 1000
save_num_checkpoints_to_keep: 0
save_num_unsharded_checkpoints_to_keep: 2"""
FSDP = """distributed_strategy: fsdp
fsdp:
  wrapping_strategy: by_block
  precision: mixed  # bf16 weights in the computation, fp32 gradient reduction
sharded_checkpointer: torch_new
save_interval: 1000
save_num_checkpoints_to_keep: 2
save_interval_unsharded: ${stop_at}  # one whole model at the end, for export
save_num_unsharded_checkpoints_to_keep: 1"""


def render() -> dict[Path, str]:
    """Every file of the pack: path → text."""
    olmo = (TEMPLATES / "olmo.yaml.in").read_text()
    megatron = (TEMPLATES / "megatron.yaml.in").read_text()
    files = {}
    for size in SIZES:
        for arm, (text, norm, init, flag) in ARMS.items():
            values = _values(size, arm, text) | {
                "NORM": norm,
                "NORM_NOTE": NORM_NOTE[norm],
                "INIT": init,
                "INIT_NOTE": INIT_NOTE[init],
                "STRATEGY": FSDP if size.sharded else DDP,
                "DEVICE": "meta" if size.sharded else "cuda",
                "DEVICE_NOTE": "drawn shard by shard" if size.sharded else "OLMo's ddp accepts cuda only",
            }
            files[ROOT / "olmo" / f"{size.name}-{arm}.yaml"] = _fill(olmo, values)
            if flag is not None:
                values["ARM_FLAG"] = flag
                files[ROOT / "megatron" / f"{size.name}-{arm}.yaml"] = _fill(megatron, values)
    return files


def _values(size: Size, arm: str, text: str) -> dict[str, str]:
    return {
        "SIZE": size.name,
        "ARM": arm,
        "ARM_TEXT": text,
        "ORIGIN": size.origin,
        "PARALLEL": size.parallel,
        "LAYERS": str(size.layers),
        "WIDTH": str(size.width),
        "HEADS": str(size.heads),
        "INNER": str(size.inner),
        "HIDDEN": str(2 * size.inner),
        "SEQUENCE": str(size.sequence),
        "BATCH": str(size.batch),
        "MICRO": str(size.micro_batch),
        "STEPS": str(size.steps),
        "TOKENS": f"{size.steps * size.sequence * size.batch:,}",
        "TOKENS_STEP": f"{size.sequence * size.batch:,}",
        "WARMUP": str(size.warmup),
        "WARMUP_SHARE": f"{100 * size.warmup / size.steps:.1f} %",
        "LR": f"{size.learning_rate:.1e}".replace("e-0", "e-"),
        "MIN_LR": f"{size.learning_rate / 10:.1e}".replace("e-0", "e-"),
    }


def _fill(template: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        template = template.replace(f"@{key}@", value)
    if "@" in template:
        raise ValueError(f"a template key was not filled near {template[template.index('@') :][:40]!r}")
    return template


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    files = render()
    committed = {path for folder in ("olmo", "megatron") for path in (ROOT / folder).glob("*.yaml")}
    stale = sorted(committed - set(files)) + [p for p in files if not p.is_file() or p.read_text() != files[p]]
    if check:
        for path in stale:
            print(f"not what renders: {path.relative_to(ROOT.parent)}", file=sys.stderr)
        return int(bool(stale))
    for path in committed - set(files):
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"wrote {len(files)} files under {ROOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
