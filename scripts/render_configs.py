#!/usr/bin/env python3
"""Render configs/olmo, configs/olmo_core and configs/megatron from a table of sizes and olmo_lns.study.arms.

python scripts/render_configs.py          writes the files
python scripts/render_configs.py --check  exits 1 when a committed file is not what renders
python scripts/render_configs.py --compare OLMO_CHECKOUT
    prints for every value of configs/olmo/<size>-preln.yaml whose it is, beside OLMo's own file of that size

Edit the tables, never the rendered files. No framework is needed, but for --compare, which asks OLMo for its defaults.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from olmo_lns.study.arms import Arm, arm_named
from olmo_lns.study.data.corpora import DOLMA
from olmo_lns.study.engines import MEGATRON, OLMO, OLMO_CORE
from olmo_lns.study.engines.olmo_core import OURS
from olmo_lns.study.plan.compare import settings_of

ROOT = Path(__file__).resolve().parents[1] / "configs"
TEMPLATES = Path(__file__).resolve().parent / "templates"
BUDGET = 20_000_000_000  # tokens a run: the paper's


@dataclass(frozen=True)
class Size:
    """:param micro_batch: sequences a GPU takes at once; changes speed and memory, not the result.

    :param origin: OLMo's own file of the size. :param tensor: Megatron's tensor-model-parallel size.
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


SIZES = (
    Size("60M", 8, 512, 8, 2048, 4096, 128, 6e-4, 8, False, "configs/tiny/OLMo-60M.yaml"),
    Size("150M", 12, 768, 12, 3072, 4096, 128, 6e-4, 4, False, "configs/tiny/OLMo-150M.yaml"),
    Size("300M", 16, 1024, 16, 4096, 4096, 128, 6e-4, 4, False, "configs/tiny/OLMo-300M.yaml"),
    Size("1B", 16, 2048, 16, 8192, 2048, 256, 4e-4, 8, True, "configs/official-0724/OLMo-1B.yaml"),
    Size(
        "7B", 32, 4096, 32, 11008, 2048, 256, 3e-4, 2, True, "configs/official-0724/OLMo-7B.yaml", tensor=2,
        parallel="#   A100-80 / H100-80, 8 GPUs or more: TP 2, sequence parallel, as below. Fewer: TP 4 or PP 2.\n"
        "#   Started without -m olmo_lns, which sets it: export CUDA_DEVICE_MAX_CONNECTIONS=1.\n"
        "#   H200 (141 GB), 8 GPUs or more: --tensor-model-parallel-size 1.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Llama:
    """A LLaMA of the papers' C4 runs. :param why: sources of the values that they do not agree on."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    steps: int
    warmup: int
    learning_rate: str
    micro_batch: int
    why_width: str = "both papers and the authors' config"
    why_rate: str = "both papers"
    why_steps: str = "the authors' script"
    why_warmup: str = "a tenth of the steps, as both papers say"
    sharded: bool = False


LLAMAS = (
    Llama("71M", 12, 512, 1368, 8, 10_000, 1_000, "1.0e-3", 64, why_width="the Mix-LN paper and the authors' config"),
    Llama("130M", 12, 768, 2048, 12, 20_000, 2_000, "1.0e-3", 64),
    Llama(
        "250M", 24, 768, 2560, 16, 40_000, 4_000, "1.0e-3", 64,
        why_width="the authors' config; Mix-LN's table 7 says 1024, which would be 355M parameters",
    ),
    Llama(
        "350M", 24, 1024, 2736, 16, 60_000, 6_000, "1.0e-3", 64,
        why_rate="the LNS paper, section 5.1, and a co-author's logs; the published script says 5e-4",
    ),
    Llama(
        "0.5B", 24, 896, 4864, 14, 60_000, 6_000, "1.0e-3", 64,
        why_width="a co-author's qwen_0_5_b.json: Qwen2.5-0.5B's shape without its GQA, qkv bias, tied embedding",
        why_rate="ours: the 350M's; table 4 says nothing but 6B tokens",
        why_steps="ours: the 350M's, of which the paper prints 6.0B tokens too",
        why_warmup="ours: a tenth of the steps",
    ),
    Llama(
        "1B", 24, 2048, 5461, 32, 100_000, 10_000, "5.0e-4", 32,
        why_warmup="a tenth, as both papers say; the authors' scripts say 1000",
        why_steps="the authors' script; the Mix-LN paper's 1B has 50,000", sharded=True,
    ),
    Llama(
        "7B", 32, 4096, 11008, 32, 150_000, 15_000, "5.0e-4", 4,
        why_steps="the schedule of the authors' script; they stopped at 13,000: --stop_at=13000", sharded=True,
    ),
)  # fmt: skip

#: Arms of the pack. Any other runs from these files too, with its keys on the command line or in a study description.
PACK = ("preln", "preln_scaled_init", "lns", "preln_mitchell")
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
save_interval: null  # with torch 2.3 and newer OLMo cannot load what its default torch_new has saved
save_interval_unsharded: 1000  # whole models: to resume on any number of GPUs, and for export
save_num_checkpoints_to_keep: 0
save_num_unsharded_checkpoints_to_keep: 2"""


def render() -> dict[Path, str]:
    """Every file of the pack: path → text."""
    olmo = (TEMPLATES / "olmo.yaml.in").read_text()
    olmo_core = (TEMPLATES / "olmo_core.yaml.in").read_text()
    megatron = (TEMPLATES / "megatron.yaml.in").read_text()
    files = {}
    for size in SIZES:
        for arm in map(arm_named, PACK):
            values = _values(size, arm)
            files[ROOT / "olmo" / f"{size.name}-{arm.name}.yaml"] = _fill(olmo, values | _olmo(size, arm))
            if arm.initialization == "plain" and (found := OLMO_CORE.arm(arm)) is not None:
                file = ROOT / "olmo_core" / f"{size.name}-{arm.name}.yaml"
                files[file] = _fill(olmo_core, values | _olmo_core(found))
            if (found := MEGATRON.arm(arm)) is not None:
                flags = {"ARM_FLAG": _flags(found)}
                files[ROOT / "megatron" / f"{size.name}-{arm.name}.yaml"] = _fill(megatron, values | flags)
    llama = (TEMPLATES / "olmo-llama-c4.yaml.in").read_text()
    return files | {ROOT / "olmo" / "llama-c4" / f"{each.name}.yaml": _fill(llama, _llama(each)) for each in LLAMAS}


def _llama(size: Llama) -> dict[str, str]:
    return {
        "SIZE": size.name,
        "LAYERS": str(size.layers),
        "WIDTH": str(size.width),
        "HIDDEN": str(2 * size.inner),
        "INNER": str(size.inner),
        "HEADS": str(size.heads),
        "STEPS": str(size.steps),
        "WARMUP": str(size.warmup),
        "LR": size.learning_rate,
        "MICRO": str(size.micro_batch),
        "WHY_WIDTH": size.why_width,
        "WHY_RATE": size.why_rate,
        "WHY_STEPS": size.why_steps,
        "WHY_WARMUP": size.why_warmup,
        "TOKENS": f"{size.steps * 512 * 256:,}",
        "STRATEGY": FSDP if size.sharded else DDP,
        "DEVICE": "meta" if size.sharded else "cuda",
    }


def _olmo(size: Size, arm: Arm) -> dict[str, str]:
    settings = settings_of(arm, OLMO)
    init_fn = settings["model.init_fn"]
    scaled = f"RMSNorm under {arm.scheme.definition.title}; named in full so that the file says which norm"
    return {
        "NORM": settings["model.layer_norm_type"],
        "NORM_NOTE": "RMSNorm with gain" if arm.scheme.is_pre_ln else scaled,
        "INIT": init_fn,
        "INIT_NOTE": INIT_NOTE[init_fn],
        "STRATEGY": FSDP if size.sharded else DDP,
        "DEVICE": "meta" if size.sharded else "cuda",
        "DEVICE_NOTE": "drawn shard by shard" if size.sharded else "OLMo's ddp accepts cuda only",
    }


def _olmo_core(settings: dict[str, Any]) -> dict[str, str]:
    block = settings["model.block._CLASS_"]
    fields = [f"{key}: {settings[f'model.block.{key}']}" for key in ("scheme", "exponent") if block == OURS]
    return {
        "BLOCK": block,
        "BLOCK_NOTE": "olmo-lns's block config" if block == OURS else "OLMo-core's own block config",
        "SCHEME": "".join(f"\n    {line}" for line in fields),
    }


def _flags(settings: dict[str, Any]) -> str:
    if not settings:
        return "# no arm flag: stock Megatron scales the residual output projections by 1/sqrt(2 L)"
    values = {key: str(value).lower() for key, value in settings.items()}
    return "\n".join(f"{k.replace('_', '-')}: {v}  # the plugin's flag: {FLAG_NOTE[k]}" for k, v in values.items())


def _values(size: Size, arm: Arm) -> dict[str, str]:
    return {
        "SIZE": size.name,
        "VOCABULARY": str(DOLMA.vocabulary),
        "EMBEDDING": str(DOLMA.embedding),
        "EMBEDDING_TEXT": f"{DOLMA.embedding:,}",
        "EMBEDDING_LESS": str(DOLMA.embedding - 1),
        "EMBEDDING_LESS_TEXT": f"{DOLMA.embedding - 1:,}",
        "EOS": str(DOLMA.eos),
        "PADDING": str(DOLMA.padding),
        "DTYPE": DOLMA.dtype,
        "FILES": DOLMA.files,
        "TOKENIZER": DOLMA.tokenizer,
        "ARM": arm.name,
        "ARM_TEXT": arm.about,
        "ORIGIN": size.origin,
        "OLMO_WARMUP": ", warm-up" if size.name == "1B" else "",
        "WARMUP_NOTE": "as OLMo's 1B" if size.name == "1B" else "ours, OLMo's 1B's; OLMo's own says 5000",
        "EPS_NOTE": "ours: OLMo's file leaves its default of 1e-5" if size.sharded else "OLMo's",
        "DECAY_NOTE": "ours: OLMo's file leaves its default of false" if size.sharded else "OLMo's",
        "DROPPED": ";\n#   dropped: OLMo's grad_clip_warmup_*" if size.name == "7B" else "",
        "TENSOR": f"\ntensor-model-parallel-size: {size.tensor}\nsequence-parallel: true" if size.tensor > 1 else "",
        "PARALLEL": size.parallel,
        "LAYERS": str(size.layers),
        "WIDTH": str(size.width),
        "HEADS": str(size.heads),
        "INNER": str(size.inner),
        "HIDDEN": str(2 * size.inner),
        "SEQUENCE": str(size.sequence),
        "BATCH": str(size.batch),
        "MICRO": str(size.micro_batch),
        "MICRO_TOKENS": str(size.micro_batch * size.sequence),
        "TOKENS_STEP_PLAIN": str(size.sequence * size.batch),
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


#: Left out of the comparison: a site's own.
SITE = (
    "run_name",
    "save_",
    "load_path",
    "wandb",
    "data.",
    "evaluators",
    "eval_",
    "remote_",
    "dry_run",
    "tokenizer.trunc",
)


def compare(checkout: Path) -> list[tuple[str, str, str, str, str]]:
    """``(size, key, our value, OLMo's, whose)`` of each value that a file of ours or of OLMo's names.

    Whose: ``OLMo's``, ``OLMo's default`` (its file does not name the key), ``ours``, or ``dropped`` (ours leaves OLMo's
    default where OLMo's file sets the key).
    """
    import yaml
    from olmo.config import TrainConfig

    from olmo_lns.study.engines.olmo_config import flatten

    defaults = flatten(TrainConfig())
    found = []
    for size in SIZES:
        ours = flatten(yaml.safe_load((ROOT / "olmo" / f"{size.name}-preln.yaml").read_text()))
        theirs = flatten(yaml.safe_load((checkout / size.origin).read_text()))
        if ratio := theirs.pop("model.mlp_ratio", None):
            theirs.setdefault("model.mlp_hidden_size", ratio * theirs["model.d_model"])
        for key in (key for key in {**ours, **theirs} if not key.startswith(SITE)):
            mine, its = (_plain(values.get(key, defaults.get(key))) for values in (ours, theirs))
            equal = "OLMo's" if key in theirs else "OLMo's default"
            whose = equal if mine == its else "ours" if key in ours else "dropped"
            found.append((size.name, key, mine, its, whose))
    return found


def _plain(value: Any) -> str:
    """Numbers as numbers: YAML takes 1e-6 for text."""
    try:
        return f"{float(value):g}" if not isinstance(value, bool) else str(value)
    except (TypeError, ValueError):
        return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--compare", type=Path, metavar="OLMO_CHECKOUT")
    args = parser.parse_args()
    if args.compare:
        for row in compare(args.compare):
            print("{:5} {:36} {:24} {:24} {}".format(*row))
        return 0
    check, files = args.check, render()
    folders = ("olmo", "olmo/llama-c4", "olmo_core", "megatron")
    committed = {path for folder in folders for path in (ROOT / folder).glob("*.yaml")}
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
