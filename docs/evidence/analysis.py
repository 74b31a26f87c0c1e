#!/usr/bin/env python
"""The numbers, tables and figure of docs/evidence.md, from the tables of runs beside this file.

    python docs/evidence/analysis.py            prints every contrast; writes docs/evidence-runs.md and contrast.png

A setting is a table, depth, width, variant and number of tokens. In each setting the seed that saw the most rates
chooses the rate of every arm; the other seeds report. In the screenings (E2, E3, E4) the mean over all seeds chooses
and reports, as planned. Differences are paired by seed, each arm at its own rate; an interval is Student's t, 95 %.
Runs that branch off one trunk are one trajectory. Tables that are not complete are read as far as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from olmo_lns.study.arms import ARMS, arm_named

HERE = Path(__file__).resolve().parent
SETTING = ["table", "width", "layers", "variant", "tokens"]
#: Tables in which all seeds see all rates: their mean chooses the rate.
SCREENINGS = ("runs-e2", "runs-e3", "runs-e4")
#: Arms of E2 that are spelled, not named: they are in the table of arms once they are looked up.
SPELLED = [arm_named(f"lnsuniform:factor={factor}").name for factor in (0.25, 0.5)]
#: What is compared: the first minus the second.
PAIRS = [
    ("lns", "preln"), ("lns", "preln_scaled_init"), ("preln_scaled_init", "preln"), ("lnsvalue", "preln"),
    ("lnsvalue", "preln_scaled_init"), ("lnsvalue", "lns"), ("lns_head", "preln_head"), ("lns_scaled_init", "lns"),
    *((arm, "preln") for arm in ("lnsafterbranch", "lnsrate", "lnsstart", "lnsuniform", "lnsreversed", *SPELLED)),
]  # fmt: skip


def read(folder: Path) -> pd.DataFrame:
    """The complete runs of ``runs*.csv``: one row each, ``nats`` its held-out loss (else its training loss)."""
    tables = [path for path in sorted(folder.glob("runs*.csv")) if path.stat().st_size]
    runs = pd.concat([pd.read_csv(path).assign(table=path.stem) for path in tables], ignore_index=True)
    runs = runs[runs.status == "complete"].copy()
    runs["nats"] = runs.heldout.fillna(runs.loss).fillna(np.inf)  # a run that diverged is worse than any other
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


def choose(setting: pd.DataFrame, together: bool = False) -> tuple[int, pd.DataFrame]:
    """The choosing seed, and by arm its best rate: ``rate``, ``loss``, ``tried``, ``edge``, ``parabola``.

    ``parabola`` is the rate at the vertex of a parabola in log rate through the best rate and its two neighbours.

    :param together: the mean over the seeds that have all rates of an arm chooses, where there is such a seed.
    """
    seed = int(setting.groupby("seed").learning_rate.nunique().idxmax())
    found = {}
    for arm, mine in setting.groupby("arm"):
        grid = mine.pivot_table(index="learning_rate", columns="seed", values="nats")
        complete = grid.dropna(axis="columns")
        if together and not complete.empty:
            losses = complete.mean(axis="columns")
        elif seed in grid:
            losses = grid[seed].dropna()
        else:
            continue
        at = int(losses.to_numpy().argmin())
        inside = 0 < at < len(losses) - 1
        vertex = float("nan")
        if inside:
            a, b, _ = np.polyfit(np.log(losses.index[at - 1 : at + 2]), losses.iloc[at - 1 : at + 2], 2)
            vertex = float(np.exp(-b / (2 * a)))
        edge = "" if inside or len(losses) == 1 else "lowest" if at == 0 else "highest"
        found[arm] = [losses.index[at], losses.iloc[at], len(losses), edge, vertex]
    return seed, pd.DataFrame.from_dict(found, "index", columns=["rate", "loss", "tried", "edge", "parabola"])


def paired(setting: pd.DataFrame, arm: str, base: str, together: bool = False) -> dict[str, object] | None:
    """``arm − base`` at own rates over the seeds that did not choose; over the choosing one where it is alone.

    None where an arm is missing, no seed has both, or one arm had a choice of rates and the other none.

    :param together: as in :func:`choose`; all seeds report.
    """
    seed, best = choose(setting, together)
    if not {arm, base} <= set(best.index):
        return None
    tried = best.loc[[arm, base], "tried"]
    if tried.min() == 1 < tried.max() and not together:
        return None
    one, other = (
        setting[(setting.arm == name) & (setting.learning_rate == best.rate[name])].set_index("seed")
        for name in (arm, base)
    )
    gaps = (one.nats - other.nats).dropna()
    independent = gaps if together or tried.max() == 1 else gaps.drop(index=seed, errors="ignore")
    values = gaps if independent.empty else independent
    if values.empty:
        return None
    by = "the choosing seed" if independent.empty else "all seeds" if together or tried.max() == 1 else "other seeds"
    return {
        "contrast": f"{arm} − {base}",
        "mean": values.mean(),
        "±": half_interval(values),
        "sd": values.std() if len(values) > 1 else float("nan"),
        "seeds": len(values),
        "by": by,
        "rates": f"{best.rate[arm]:g}, {best.rate[base]:g}",
        "edge": ", ".join(f"{name}: {best.edge[name]}" for name in (arm, base) if best.edge[name]),
    }


def contrasts(runs: pd.DataFrame) -> pd.DataFrame:
    """Every pair of :data:`PAIRS` in every setting that has it."""
    rows = []
    for key, setting in runs[~runs.trunk].groupby(SETTING):
        for pair in PAIRS:
            if (found := paired(setting, *pair, together=key[0] in SCREENINGS)) is not None:
                ratio = setting.tokens.iloc[0] / setting.parameters.iloc[0]
                rows.append(dict(zip(SETTING, key, strict=True)) | {"tokens a parameter": ratio} | found)
    return pd.DataFrame(rows)


def by_table(runs: pd.DataFrame) -> pd.DataFrame:
    """How far each table is: end points, arms, seeds, trajectories, CPU-hours of its runs and trunks."""
    tables = runs.groupby("table")
    return pd.DataFrame(
        {
            "end points": (~runs.trunk).groupby(runs.table).sum(),
            "arms": tables.arm.nunique(),
            "seeds": tables.seed.nunique(),
            "trajectories": tables.trajectory.nunique(),
            "CPU-hours": (tables.cpu_s.sum() / 3600).round(1),
        }
    )


def counts(runs: pd.DataFrame) -> str:
    """Rows and independent trajectories beside each other, and what they cost."""
    ends = runs[~runs.trunk]
    return (
        f"{len(runs)} complete runs: {len(ends)} end points and {int(runs.trunk.sum())} trunks, "
        f"{runs.trajectory.nunique()} independent trajectories, {runs.cpu_s.sum() / 3600:.1f} CPU-hours where the time "
        "is known."
    )


def page(runs: pd.DataFrame) -> str:
    """``docs/evidence-runs.md``: the losses of the longest runs of each setting."""
    parts = [
        "# The runs behind the evidence",
        "Made by `python docs/evidence/analysis.py` from the tables in `docs/evidence`; not to be edited. "
        "Held-out loss in nats a token, by arm, rate and seed; bold at the rate that is chosen for the arm. Where a "
        "trunk has several branches, the longest stands here; the tables have all. "
        "[Evidence](evidence.md) says what follows.",
        counts(runs),
    ]
    ends = runs[~runs.trunk]
    longest = ends.groupby(SETTING[:-1]).tokens.transform("max") == ends.tokens
    for key, setting in ends[longest].groupby(SETTING):
        table, width, layers, variant, tokens = key
        together = table in SCREENINGS
        seed, best = choose(setting, together)
        ratio = tokens / setting.parameters.iloc[0]
        title = f"{layers} blocks, width {width}, {tokens / 1e6:.3g}M tokens" + (f", {variant}" if variant else "")
        chosen = "their mean" if together else f"seed {seed}"
        parts.append(f"## {title}\n\n`{table}.csv`, {ratio:.2g} tokens a parameter; {chosen} chooses.")
        grid = setting.pivot_table(index=["arm", "learning_rate"], columns="seed", values="nats")
        lines = ["| arm | rate | " + " | ".join(f"seed {name}" for name in grid.columns) + " |"]
        lines.append("|---" * (2 + len(grid.columns)) + "|")
        for arm in (name for name in ARMS if name in set(setting.arm)):
            for rate, row in grid.loc[arm].iterrows():
                bold = arm in best.index and rate == best.rate[arm]
                mark = {name: "**" if bold and (together or name == seed) else "" for name in row.index}
                cells = ["–" if np.isnan(loss) else f"{mark[name]}{loss:.3f}{mark[name]}" for name, loss in row.items()]
                lines.append(f"| {ARMS[arm].label} | {rate:g} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def removal() -> pd.DataFrame:
    """Mean loss of one block left out, nats, by folder and arm: the front half without block 1, and the deep half."""
    rows = []
    for path in sorted((HERE / "layers").glob("*/layer-drop-*.json")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        cost = np.array(saved["result"]["loss"]) - saved["result"]["baseline_loss"]
        half = len(cost) // 2
        arm = path.stem.split("-")[2]
        rows.append({"models": path.parent.name, "arm": arm, "front": cost[1:half].mean(), "deep": cost[half:].mean()})
    return pd.DataFrame(rows).groupby(["models", "arm"]).agg(["mean", "count"]).round(3)


def draw(found: pd.DataFrame, depth: pd.DataFrame, path: Path) -> None:
    """Left: our contrasts by tokens a parameter. Right: DepthBench, minus Pre-LN, by depth.

    An arm has one colour and marker in both. Hollow: against scaled initialization. Small: fewer than three seeds.
    Pale: 20 steps of warm-up instead of 100.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 4.4), dpi=140)
    short = (found.table == "runs") & (found.width == 32) & (found["tokens a parameter"] > 3)  # 20 steps of warm-up
    ours = found[found.table.isin(["runs-e1", "runs-e3", "runs-e4"]) | (found.variant == "warmup100") | short]
    shift, named = 0.97, set()
    for name, short_name in (("lns", "LNS"), ("lnsvalue", "lnsvalue")):
        arm = ARMS[name]
        for base, fill in (("preln", "full"), ("preln_scaled_init", "none")):
            label = f"{short_name} − {ARMS[base].label.removeprefix('Pre-LN + ')}"
            for _, line in ours[ours.contrast == f"{name} − {base}"].sort_values("table", ascending=False).iterrows():
                several, pale = line.seeds > 2, line.table == "runs"
                style = {"alpha": 0.35 if pale else 1, "markersize": 7 if several else 4, "fillstyle": fill}
                if not pale and label not in named:
                    style["label"] = label
                    named.add(label)
                left.errorbar(line["tokens a parameter"] * shift * (0.96 if pale else 1), line["mean"],
                              line["±"] if several else None, color=arm.colour, capsize=3, linewidth=1,
                              marker=arm.marker, linestyle="none", **style)  # fmt: skip
            shift *= 1.03
    left.set_xscale("log")
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16) if tick > ours["tokens a parameter"].min() / 2.1]
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.set_ylim(-0.1, 0.1)
    left.set_xlabel("tokens a parameter")
    left.set_ylabel("difference of loss (nats a token)")
    left.set_title("ours: 0.4M to 3M parameters", fontsize=10)
    styles = {name: (ARMS[name].line, ARMS[name].marker, ARMS[name].colour) for name in ("lns", "sandwich", "deepnorm")}
    styles["hyper_connections"] = ("-", "x", "#444444")
    names = {"lns": "LNS", "sandwich": "Sandwich-LN", "deepnorm": "DeepNorm", "hyper_connections": "hyper-connections"}
    for name, (line, marker, colour) in styles.items():
        right.plot(depth.layers, depth[name] - depth.preln, line, marker=marker, color=colour, markersize=6,
                   label=f"{names[name]} − Pre-LN")  # fmt: skip
    right.set_xticks(depth.layers)
    right.set_xlabel("blocks")
    right.set_title("DepthBench: 400M parameters, one seed", fontsize=10)
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2, frameon=False)
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
    print(by_table(runs).to_string())
    for key, setting in runs[~runs.trunk].groupby(SETTING):
        together = key[0] in SCREENINGS
        seed, best = choose(setting, together)
        means = setting.groupby(["arm", "learning_rate"]).nats.agg(["mean", "std", "count"]).round(4)
        print(
            f"\n{dict(zip(SETTING, key, strict=True))}, {setting.trajectory.nunique()} trajectories; "
            f"{'the mean' if together else f'seed {seed}'} chooses"
        )
        print(best.round(4).to_string())
        print(means.to_string())
    print("\nContrasts, own rates, paired by seed; ± is half the 95 % interval:\n")
    print(found.round({"mean": 4, "±": 4, "sd": 4, "tokens a parameter": 2}).to_string(index=False))
    print(
        "\nMean loss of one block left out, nats, front half without block 1 and deep half, and the number of models:"
    )
    print(removal().to_string())
    print("\nDepthBench, LNS − Pre-LN:")
    print((depth.set_index("layers").lns - depth.set_index("layers").preln).round(3).to_string())
    args.page.write_text(page(runs), encoding="utf-8")
    draw(found, depth, args.figure)
    print(f"\nwrote {args.page} and {args.figure}")


if __name__ == "__main__":
    main()
