#!/usr/bin/env python3
"""Render configs/olmo, configs/olmo_core and configs/megatron from a table of sizes and olmo_lns.arms.

python scripts/render_configs.py          writes the files
python scripts/render_configs.py --check  exits with 1 if a committed file differs from the rendered one

Edit the tables, never the rendered files. No framework needs to be installed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jinja2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from olmo_lns.arms import BASELINE, Arm, arm_from_text
from olmo_lns.study.data.corpora import DOLMA
from olmo_lns.study.engines import MEGATRON, OLMO, OLMO_CORE

ROOT = Path(__file__).resolve().parents[1] / "configs"
TEMPLATES = Path(__file__).resolve().parent / "templates"
BUDGET = 20_000_000_000  # tokens per run, as in the paper


@dataclass(frozen=True)
class Size:
    """A size of the pack. :param micro_batch: sequences per GPU and pass, which do not change the result.

    :param origin: OLMo's config of the size. :param tensor: Megatron's tensor-model-parallel size.
    """

    name: str
    layers: int
    width: int
    heads: int
    inner: int
    sequence: int
    batch: int
    learning_rate: float
    micro_batch: int
    sharded: bool
    origin: str
    warmup: int = 2000
    tensor: int = 1
    parallel: str = "#   A100-80 / H100-80 / H200: TP 1, PP 1 (data parallel only)."

    @property
    def steps(self) -> int:
        return -(-BUDGET // (self.sequence * self.batch))

    @property
    def tokens(self) -> int:
        return self.steps * self.sequence * self.batch


SIZES = (
    Size("60M", 8, 512, 8, 2048, 4096, 128, 6e-4, 8, False, "configs/tiny/OLMo-60M.yaml"),
    Size("150M", 12, 768, 12, 3072, 4096, 128, 6e-4, 4, False, "configs/tiny/OLMo-150M.yaml"),
    Size("300M", 16, 1024, 16, 4096, 4096, 128, 6e-4, 4, False, "configs/tiny/OLMo-300M.yaml"),
    Size("1B", 16, 2048, 16, 8192, 2048, 256, 4e-4, 8, True, "configs/official-0724/OLMo-1B.yaml"),
    Size(
        "7B", 32, 4096, 32, 11008, 2048, 256, 3e-4, 2, True, "configs/official-0724/OLMo-7B.yaml", tensor=2,
        parallel="#   A100-80 / H100-80, 8 GPUs or more: TP 2, sequence parallel, as below. Fewer: TP 4 or PP 2.\n"
        "#   A launch without -m olmo_lns needs: export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        "#   H200 (141 GB), 8 GPUs or more: --tensor-model-parallel-size 1.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Llama:
    """A LLaMA of the papers' C4 runs. ``why_*`` names the source of a value on which the papers differ."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    steps: int
    warmup: int
    learning_rate: float
    micro_batch: int
    papers: str = "both papers"
    why_width: str = "both papers and the authors' config"
    why_rate: str = "both papers"
    why_steps: str = "the authors' script"
    why_warmup: str = "a tenth of the steps, as the Mix-LN paper says"
    clip: str = "null"
    why_clip: str = "code: 0.0, no clipping"
    sharded: bool = False

    @property
    def tokens(self) -> int:
        return self.steps * 512 * 256


LLAMAS = (
    Llama("71M", 12, 512, 1368, 8, 10_000, 1_000, 1.0e-3, 64, why_width="the Mix-LN paper and the authors' config"),
    Llama("130M", 12, 768, 2048, 12, 20_000, 2_000, 1.0e-3, 64),
    Llama(
        "250M", 24, 768, 2560, 16, 40_000, 4_000, 1.0e-3, 64,
        why_width="the authors' config; Mix-LN's table 7 says 1024, which would be 355M parameters",
    ),
    Llama(
        "350M", 24, 1024, 2736, 16, 60_000, 6_000, 1.0e-3, 64,
        why_rate="the LNS paper, section 5.1, and a co-author's logs; the published script says 5e-4",
    ),
    Llama(
        "0.5B", 24, 896, 4864, 14, 60_000, 6_000, 1.0e-3, 64,
        why_width="a co-author's qwen_0_5_b.json: Qwen2.5-0.5B's shape without its GQA, qkv bias, tied embedding",
        why_rate="ours: the 350M's; table 4 says nothing but 6B tokens",
        why_steps="ours: the 350M's, of which the paper prints 6.0B tokens too",
        why_warmup="ours: a tenth of the steps",
    ),
    Llama(
        "1B", 24, 2048, 5461, 32, 100_000, 10_000, 5.0e-4, 32,
        why_warmup="a tenth, as the Mix-LN paper says; the authors' scripts say 1000",
        why_steps="the authors' script; the Mix-LN paper's 1B has 50,000", sharded=True,
    ),
    Llama(
        "7B", 32, 4096, 11008, 32, 150_000, 15_000, 5.0e-4, 4,
        papers="the Mix-LN paper; the LNS paper has no row of LLaMA-7B",
        why_width="the Mix-LN paper and the authors' config",
        why_rate="the Mix-LN paper",
        why_warmup="run_7b.sh of pixeli99, who owns the Mix-LN code too (_GaLore, 4a08a12); a tenth of the steps",
        why_steps="that script's. The Mix-LN paper stops at 13,000: --stop_at=13000 repeats it. By that script's\n"
        "# warm-up the rate is then at 13/15 of its peak, 4.33e-4, and has never decayed: its curves compare models\n"
        "# at a rising rate.",
        clip="1.0", why_clip="that script; the authors' scripts of the other sizes say 0.0", sharded=True,
    ),
)  # fmt: skip

#: Arms of the pack. Other arms use the same files with their keys on the command line or in a study description.
PACK = ("preln", "preln_scaled_init", "lns", "preln_mitchell")
INIT_TEXT = {
    "plain": "every matrix at std 0.02",
    "scaled": "residual output projections at std 0.02/sqrt(2 L)",
    "upstream": "the framework's own initialization",
}
INIT_NOTE = {
    "normal": "every matrix N(0, init_std), cut at 3 std",
    "normal_scaled": "as normal, but attn_out and ff_out at init_std/sqrt(2 L); an init_fn of olmo-lns",
    "normal_depth_scaled": "as normal, but attn_out and ff_out at init_std/sqrt(2 l); an init_fn of olmo-lns",
    "full_megatron": "as normal, but attn_out and ff_out at init_std/sqrt(2 L), and the head at 1/sqrt(d_model)",
    "mitchell": "1/sqrt(d) and 1/sqrt(2 d l) by depth; init_std is not used",
}
FLAG_NOTE = {
    "no_scaled_init": "residual output projections at std 0.02, not 0.02/sqrt(2 L)",
    "layernorm_scaling": "block norms times 1/sqrt(l); scaled initialization off with it",
    "layernorm_scaling_exponent": "of the block number; 0.5 by default",
    "layernorm_scaling_keep_scaled_init": "residual output projections at 0.02/sqrt(2 L) all the same",
}


def rate(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def about(arm: Arm) -> str:
    """Describe an arm: its scheme, its initialization, and how it differs from the baseline."""
    init = f"OLMo's init_fn {arm.init_fn}" if arm.init_fn else INIT_TEXT[arm.initialization]
    purpose = f"differs from preln only by {arm.only_difference}" if arm.only_difference else "differs in several ways"
    return f"{arm.scheme.definition.label}, {init}; {'the baseline' if arm.name == BASELINE else purpose}"


def render() -> dict[Path, str]:
    """Return the text of every file of the pack by its path."""
    context = {"corpus": DOLMA, "rate": rate, "about": about, "init_note": INIT_NOTE, "flag_note": FLAG_NOTE}
    loader = jinja2.FileSystemLoader(TEMPLATES)
    jinja = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)

    def fill(template: str, **values: Any) -> str:
        return jinja.get_template(f"{template}.yaml.in").render(context | values)

    files = {ROOT / "olmo" / "llama-c4" / f"{size.name}.yaml": fill("olmo-llama-c4", size=size) for size in LLAMAS}
    for size, arm in product(SIZES, map(arm_from_text, PACK)):
        for engine in (OLMO, OLMO_CORE, MEGATRON):
            settings, folder = engine.arm_overrides(arm), engine.name.replace("-", "_")
            if settings is not None and (engine is not OLMO_CORE or arm.initialization == "plain"):
                file = ROOT / folder / f"{size.name}-{arm.name}.yaml"
                files[file] = fill(folder, size=size, arm=arm, settings=settings)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    files = render()
    folders = ("olmo", "olmo/llama-c4", "olmo_core", "megatron")
    committed = {path for folder in folders for path in (ROOT / folder).glob("*.yaml")}
    stale = sorted(committed - set(files)) + [p for p in files if not p.is_file() or p.read_text() != files[p]]
    if args.check:
        for path in stale:
            print(f"differs from the rendered text: {path.relative_to(ROOT.parent)}", file=sys.stderr)
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
