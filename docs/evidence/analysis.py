#!/usr/bin/env python
"""The numbers, tables and figure of docs/evidence.md, from the tables of runs beside this file.

    python docs/evidence/analysis.py            prints every contrast; writes docs/evidence-runs.md and contrast.png

A setting is a table, depth, width, variant and number of tokens. In each setting the seed that saw the most rates
chooses the rate of every arm; the other seeds report. Differences are paired by seed, each arm at its own rate; an
interval is Student's t, 95 %. Runs that branch off one trunk are one trajectory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from olmo_lns.study.arms import ARMS

HERE = Path(__file__).resolve().parent
SETTING = ["table", "width", "layers", "variant", "tokens"]
#: What is compared: the first minus the second.
PAIRS = [
    ("lns", "preln"), ("lns", "preln_scaled_init"), ("preln_scaled_init", "preln"), ("lnsvalue", "preln"),
    ("lnsvalue", "preln_scaled_init"), ("lnsvalue", "lns"), ("lns_head", "preln_head"), ("lns_scaled_init", "lns"),
]  # fmt: skip


def read(folder: Path) -> pd.DataFrame:
    """The complete runs of ``runs*.csv``: one row each, ``nats`` its held-out loss (else its training loss)."""
    tables = [path for path in sorted(folder.glob("runs*.csv")) if path.stat().st_size]
    runs = pd.concat([pd.read_csv(path).assign(table=path.stem) for path in tables], ignore_index=True)
    runs = runs[runs.status == "complete"].copy()
    runs["nats"] = runs.heldout.fillna(runs.loss)
    runs["trunk"] = runs["size"].str.endswith("_trunk")
    name = runs["size"].str.removesuffix("_trunk").str.replace(r"to\d+$", "", regex=True)
    runs["variant"] = name.str.partition("_")[2]
    runs["trajectory"] = runs.table + "/" + runs.source + "/" + name + "/" + runs.arm + "/" + runs.seed.astype(str)
    runs["trajectory"] += "/" + runs.width.astype(str) + np.where(runs.trunk | (runs["size"] != name), "", runs.run)
    return runs


def half_interval(values: pd.Series) -> float:
    """Half the 95 % interval of the mean, by Student's t; NaN for fewer than two values.

    >>> round(half_interval(pd.Series([0.0, 1.0, 2.0])), 2)
    2.48
    """
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else float("nan")


def choose(setting: pd.DataFrame) -> tuple[int, pd.DataFrame]:
    """The choosing seed, and by arm its best rate: ``rate``, ``loss``, ``tried``, ``edge``, ``parabola``.

    ``parabola`` is the rate at the vertex of a parabola in log rate through the best rate and its two neighbours.
    """
    seed = int(setting.groupby("seed").learning_rate.nunique().idxmax())
    found = {}
    for arm, mine in setting[setting.seed == seed].groupby("arm"):
        losses = mine.set_index("learning_rate").nats.sort_index()
        at = int(losses.to_numpy().argmin())
        inside = 0 < at < len(losses) - 1
        vertex = float("nan")
        if inside:
            a, b, _ = np.polyfit(np.log(losses.index[at - 1 : at + 2]), losses.iloc[at - 1 : at + 2], 2)
            vertex = float(np.exp(-b / (2 * a)))
        edge = "" if inside or len(losses) == 1 else "lowest" if at == 0 else "highest"
        found[arm] = [losses.index[at], losses.iloc[at], len(losses), edge, vertex]
    return seed, pd.DataFrame.from_dict(found, "index", columns=["rate", "loss", "tried", "edge", "parabola"])


def paired(setting: pd.DataFrame, arm: str, base: str) -> dict[str, object] | None:
    """``arm − base`` at own rates over the seeds that did not choose; over the choosing one where it is alone.

    None where an arm is missing, no seed has both, or one arm had a choice of rates and the other none.
    """
    seed, best = choose(setting)
    if not {arm, base} <= set(best.index):
        return None
    tried = best.loc[[arm, base], "tried"]
    if tried.min() == 1 < tried.max():
        return None
    one, other = (
        setting[(setting.arm == name) & (setting.learning_rate == best.rate[name])].set_index("seed")
        for name in (arm, base)
    )
    gaps = (one.nats - other.nats).dropna()
    independent = gaps.drop(index=seed, errors="ignore") if tried.max() > 1 else gaps
    values = gaps if independent.empty else independent
    if values.empty:
        return None
    return {
        "contrast": f"{arm} − {base}",
        "mean": values.mean(),
        "±": half_interval(values),
        "sd": values.std() if len(values) > 1 else float("nan"),
        "seeds": len(values),
        "by": "the choosing seed" if independent.empty else "other seeds",
        "rates": f"{best.rate[arm]:g}, {best.rate[base]:g}",
    }


def contrasts(runs: pd.DataFrame) -> pd.DataFrame:
    """Every pair of :data:`PAIRS` in every setting that has it."""
    rows = []
    for key, setting in runs[~runs.trunk].groupby(SETTING):
        for pair in PAIRS:
            if (found := paired(setting, *pair)) is not None:
                ratio = setting.tokens.iloc[0] / setting.parameters.iloc[0]
                rows.append(dict(zip(SETTING, key, strict=True)) | {"tokens a parameter": ratio} | found)
    return pd.DataFrame(rows)


def counts(runs: pd.DataFrame) -> str:
    """Rows and independent trajectories beside each other, and what they cost."""
    ends = runs[~runs.trunk]
    return (
        f"{len(runs)} complete runs: {len(ends)} end points and {int(runs.trunk.sum())} trunks, "
        f"{runs.trajectory.nunique()} independent trajectories, {runs.cpu_s.sum() / 3600:.1f} CPU-hours where the time "
        "is known."
    )


def page(runs: pd.DataFrame) -> str:
    """``docs/evidence-runs.md``: the loss of every run, by setting."""
    parts = [
        "# The runs behind the evidence",
        "Made by `python docs/evidence/analysis.py` from the tables in `docs/evidence`; not to be edited. "
        "Held-out loss in nats a token; one row for each arm and learning rate, one column for each seed. A setting is "
        "one model, number of tokens and variant. Bold: the arm's lowest loss on the seed that chooses the rates. "
        "[Evidence](evidence.md) says what follows from them.",
        counts(runs),
    ]
    for key, setting in runs[~runs.trunk].groupby(SETTING):
        table, width, layers, variant, tokens = key
        seed, best = choose(setting)
        ratio = tokens / setting.parameters.iloc[0]
        title = f"{layers} blocks, width {width}, {tokens / 1e6:.3g}M tokens" + (f", {variant}" if variant else "")
        about = (
            f"{len(setting)} runs of `{table}.csv`, {setting.trajectory.nunique()} trajectories, {ratio:.2g} tokens a "
        )
        parts.append(f"## {title}\n\n{about}parameter; seed {seed} chooses.")
        grid = setting.pivot_table(index=["arm", "learning_rate"], columns="seed", values="nats")
        lines = ["| arm | rate | " + " | ".join(f"seed {name}" for name in grid.columns) + " |"]
        lines.append("|---" * (2 + len(grid.columns)) + "|")
        for arm in (name for name in ARMS if name in set(setting.arm)):
            for rate, row in grid.loc[arm].iterrows():
                bold = arm in best.index and rate == best.rate[arm]
                cells = ["–" if np.isnan(loss) else f"**{loss:.3f}**" if bold and name == seed else f"{loss:.3f}"
                         for name, loss in row.items()]  # fmt: skip
                lines.append(f"| {ARMS[arm].label} | {rate:g} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def removal() -> pd.DataFrame:
    """Mean loss of one block left out, in nats, over the seeds: front and deep half, block 1 apart."""
    rows = []
    for path in sorted((HERE / "layers" / "best").glob("layer-drop-*.json")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        cost = np.array(saved["result"]["loss"]) - saved["result"]["baseline_loss"]
        half = len(cost) // 2
        arm = path.name.split("-")[2]
        rows.append({"arm": arm, f"blocks 2 to {half}": cost[1:half].mean(), "deep half": cost[half:].mean()})
    return pd.DataFrame(rows).groupby("arm").mean().round(3)


def draw(found: pd.DataFrame, depth: pd.DataFrame, path: Path) -> None:
    """Left: our contrasts at 24 blocks by tokens a parameter. Right: DepthBench's differences to Pre-LN by depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8), dpi=120)
    ours = found[(found.layers == 24) & (found.variant == "")]
    for base in ("preln", "preln_scaled_init"):
        arm, named = ARMS["lns" if base == "preln" else base], False  # LNS − Pre-LN looks the same on both sides
        for _, line in ours[ours.contrast == f"lns − {base}"].groupby(["table", "width"]):
            line = line.sort_values("tokens a parameter")
            left.errorbar(line["tokens a parameter"], line["mean"], line["±"], color=arm.colour, capsize=3,
                          linestyle=arm.line if len(line) > 1 else "none", linewidth=1)  # fmt: skip
            for several, marks in line.groupby(line.seeds > 1):
                left.plot(marks["tokens a parameter"], marks["mean"], arm.marker, color=arm.colour, markersize=5,
                          fillstyle="full" if several else "none", linestyle="none",
                          label=None if named else f"LNS − {ARMS[base].label.removeprefix('Pre-LN + ')}")  # fmt: skip
                named = True
    left.set_xscale("log")
    ticks = [0.2, 0.5, 1, 2, 4, 8, 16]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.set_ylim(-0.2, 0.2)  # the intervals at 1 and 2 tokens a parameter are wider
    left.set_xlabel("tokens a parameter (24 blocks)")
    left.set_ylabel("difference of loss (nats a token)")
    left.set_title("ours: 0.4M to 6M parameters, own rates", fontsize=9)
    for name in ("lns", "sandwich", "deepnorm"):
        arm = ARMS[name]
        right.plot(depth.layers, depth[name] - depth.preln, arm.line, marker=arm.marker, color=arm.colour, markersize=5,
                   label=f"{arm.label.removeprefix('Pre-LN + ')} − Pre-LN")  # fmt: skip
    right.set_xticks(depth.layers)
    right.set_xlabel("blocks")
    right.set_title("DepthBench: 400M parameters, own rates", fontsize=9)
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncol=3, frameon=False)
    chart.tight_layout()
    chart.savefig(path, metadata={"Software": None})
    pyplot.close(chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=HERE, help="folder of runs*.csv (default: this file's)")
    parser.add_argument("--page", type=Path, default=HERE.parent / "evidence-runs.md")
    parser.add_argument("--figure", type=Path, default=HERE / "contrast.png")
    args = parser.parse_args()
    runs = read(args.tables)
    found = contrasts(runs)
    depth = pd.read_csv(HERE / "depthbench.csv", comment="#")
    print(counts(runs))
    for key, setting in runs[~runs.trunk].groupby(SETTING):
        seed, best = choose(setting)
        means = setting.groupby(["arm", "learning_rate"]).nats.agg(["mean", "std", "count"]).round(4)
        print(
            f"\n{dict(zip(SETTING, key, strict=True))}, {setting.trajectory.nunique()} trajectories; "
            f"seed {seed} chooses"
        )
        print(best.round(4).to_string())
        print(means.to_string())
    print("\nContrasts, own rates, paired by seed; ± is half the 95 % interval:\n")
    print(found.round({"mean": 4, "±": 4, "sd": 4, "tokens a parameter": 2}).to_string(index=False))
    print("\nOne block left out, 24 blocks, width 32, own rates, five seeds:")
    print(removal().to_string())
    print("\nDepthBench, LNS − Pre-LN:")
    print((depth.set_index("layers").lns - depth.set_index("layers").preln).round(3).to_string())
    args.page.write_text(page(runs), encoding="utf-8")
    draw(found, depth, args.figure)
    print(f"\nwrote {args.page} and {args.figure}")


if __name__ == "__main__":
    main()
