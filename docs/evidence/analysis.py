#!/usr/bin/env python
"""The numbers and the figure of docs/evidence.md and docs/what-lns-is.md, from the tables beside this file.

    python docs/evidence/analysis.py published      what others measured, in nats; draws contrast.png
    python docs/evidence/analysis.py ours           our contrasts with intervals, and E1's six after Holm's correction
    python docs/evidence/analysis.py rates          the best rate and the loss of each arm, by setting
    python docs/evidence/analysis.py removal        the loss that one block left out costs
    python docs/evidence/analysis.py equivalences   the statements of docs/what-lns-is.md, trained (torch)

Ours: a setting is a table, width, depth, variant and number of tokens. The seed that saw the most rates chooses the
rate of each arm, and the other seeds report. In the screenings (E2, E4) all seeds saw all rates: their mean chooses and
reports. Differences are paired by seed; an interval is Student's t, 95 %. Runs that branch off one trunk are one
trajectory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

HERE = Path(__file__).resolve().parent
SETTING = ["table", "width", "layers", "variant", "tokens"]
#: Tables in which all seeds see all rates: their mean chooses the rate.
SCREENINGS = ("runs-e2", "runs-e4")
#: The arms of E1, the contrast that was planned; the first of a pair minus the second.
E1 = ("preln", "preln_scaled_init", "lns", "lnsvalue")


# What others measured


def published(path: Path = HERE / "published.csv") -> pd.DataFrame:
    """The rows of ``published.csv`` with ``d_preln`` and ``d_scaled_init``: LNS minus the baseline.

    In nats a token; a row in bits a byte stays in bits a byte.
    """
    rows = pd.read_csv(path, comment="#")
    logarithm = rows.measure == "perplexity"
    for base in ("preln", "scaled_init"):
        rows[f"d_{base}"] = np.where(logarithm, np.log(rows.lns / rows[base]), rows.lns - rows[base])
    return rows


def draw(rows: pd.DataFrame, path: Path) -> None:
    """LNS minus each baseline, one line a model; legible at a width of 390 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows[rows.measure != "bpb"]
    hollow = {"color": "#D55E00", "markersize": 10, "fillstyle": "none", "markeredgewidth": 2.2}
    chart, axes = pyplot.subplots(figsize=(5.2, 7.8), dpi=150)
    titles = {"paper": "LNS paper: 2B to 20B tokens", "ProRes": "ProRes: 50B tokens"}
    titles |= {"DepthBench": "DepthBench: 400M, 8B tokens", "BHyT": "BHyT, by others: 7.5B, 20B tokens"}
    place, ticks, labels = 0.0, [], []
    for source, title in titles.items():
        axes.text(-0.315, place, title, fontsize=12, fontweight="bold", va="center")
        for _, row in rows[rows.source == source].iterrows():
            place -= 1
            ticks.append(place)
            labels.append(f"{row.layers:.0f} layers" if source == "DepthBench" else row["size"])
            fill = "none" if row["size"].startswith("OLMo") else "full"
            axes.plot(row.d_preln, place, "o", color="#0072B2", markersize=10, fillstyle=fill, markeredgewidth=2.2)
            axes.plot(row.d_scaled_init, place, "D", **hollow)
        place -= 1.5
    label = "LNS minus Pre-LN (hollow: the paper does\nnot state Pre-LN's initialization)"
    axes.plot([], [], "o", color="#0072B2", markersize=10, label=label)
    axes.plot([], [], "D", label="LNS minus scaled initialization", **hollow)
    axes.axvline(0, color="black", linewidth=1.2)
    axes.set_yticks(ticks, labels, fontsize=11)
    axes.set_xticks([-0.3, -0.2, -0.1, 0], ["−0.3", "−0.2", "−0.1", "0"], fontsize=11)
    axes.set_xlim(-0.322, 0.03)
    axes.set_ylim(place + 0.9, 0.8)
    axes.set_xlabel("difference of loss, nats a token\n← LNS is ahead", fontsize=12)
    axes.grid(axis="x", alpha=0.35)
    axes.legend(fontsize=11, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncol=1, frameon=False)
    chart.tight_layout()
    chart.savefig(path, metadata={"Software": None})
    pyplot.close(chart)


# What we measured


def read(folder: Path = HERE) -> pd.DataFrame:
    """The complete runs of ``runs*.csv``: one row each, ``nats`` its held-out loss (else its training loss)."""
    runs = pd.concat([pd.read_csv(p).assign(table=p.stem) for p in sorted(folder.glob("runs*.csv"))], ignore_index=True)
    runs = runs[runs.status == "complete"].copy()
    runs["nats"] = runs.heldout.fillna(runs.loss).fillna(np.inf)  # a run that diverged is worse than any other
    runs["trunk"] = runs["size"].str.endswith("_trunk")
    name = runs["size"].str.removesuffix("_trunk").str.replace(r"to\d+$", "", regex=True)
    runs["variant"] = name.str.partition("_")[2]
    runs["trajectory"] = runs.table + "/" + runs.source + "/" + name + "/" + runs.arm + "/" + runs.seed.astype(str)
    runs["trajectory"] += "/" + runs.width.astype(str) + np.where(runs.trunk | (runs["size"] != name), "", runs.run)
    return runs


def choose(setting: pd.DataFrame, together: bool = False) -> tuple[int, pd.DataFrame]:
    """The choosing seed, and by arm its best rate: ``rate``, ``loss``, ``tried``, ``edge``.

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
        edge = "" if 0 < at < len(losses) - 1 or len(losses) == 1 else "lowest" if at == 0 else "highest"
        found[arm] = [losses.index[at], losses.iloc[at], len(losses), edge]
    return seed, pd.DataFrame.from_dict(found, "index", columns=["rate", "loss", "tried", "edge"])


def paired(setting: pd.DataFrame, arm: str, base: str, together: bool = False) -> dict[str, Any] | None:
    """``arm − base`` at own rates over the seeds that did not choose; over the choosing one where it is alone.

    ``±`` is half the 95 % interval and ``p`` the two-sided p-value of Student's t, NaN for one seed. None where an arm
    is missing, no seed has both, or one arm had a choice of rates and the other none.

    :param together: as in :func:`choose`; all seeds report.
    """
    seed, best = choose(setting, together)
    if not {arm, base} <= set(best.index):
        return None
    tried = best.loc[[arm, base], "tried"]
    if tried.min() == 1 < tried.max() and not together:
        return None
    one, other = (
        setting[(setting.arm == name) & (setting.learning_rate == best.rate[name])].set_index("seed").nats
        for name in (arm, base)
    )
    gaps = (one - other).dropna()
    all_report = together or tried.max() == 1
    values = gaps if all_report else gaps.drop(index=seed, errors="ignore")
    by = "all seeds" if all_report else "other seeds"
    if values.empty:
        values, by = gaps, "the choosing seed"
    if values.empty:
        return None
    several = len(values) > 1
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if several else np.nan
    p = stats.ttest_1samp(values, 0).pvalue if several else np.nan
    edges = ", ".join(f"{name}: {best.edge[name]}" for name in (arm, base) if best.edge[name])
    rates = f"{best.rate[arm]:g}, {best.rate[base]:g}"
    row = {"contrast": f"{arm} − {base}", "mean": values.mean(), "±": half, "p": p, "seeds": len(values), "by": by}
    return row | {"rates": rates, "edge": edges}


def contrasts(runs: pd.DataFrame) -> pd.DataFrame:
    """LNS against both baselines, and the other arms against Pre-LN, in every setting that has them."""
    rows = []
    for key, setting in runs[~runs.trunk].groupby(SETTING):
        arms = [arm for arm in setting.arm.unique() if arm != "preln"]
        for pair in [*((arm, "preln") for arm in arms), ("lns", "preln_scaled_init")]:
            if (found := paired(setting, *pair, together=key[0] in SCREENINGS)) is not None:
                ratio = setting.tokens.iloc[0] / setting.parameters.iloc[0]
                rows.append(dict(zip(SETTING, key, strict=True)) | {"tokens a parameter": ratio} | found)
    return pd.DataFrame(rows)


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's adjusted p-values: the k-th smallest of m times m − k + 1, never below a smaller one's.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    adjusted = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    result = np.empty(len(p))
    result[order] = np.minimum(adjusted, 1)
    return result


def planned(runs: pd.DataFrame) -> pd.DataFrame:
    """E1's six contrasts at 16 tokens a parameter, with Holm's correction."""
    setting = runs[(runs.table == "runs-e1") & ~runs.trunk & (runs.tokens == runs.tokens.max())]
    rows = pd.DataFrame([paired(setting, arm, base) for base, arm in combinations(E1, 2)])
    return rows.assign(**{"p, Holm": holm(rows.p.to_numpy())})


def removal() -> pd.DataFrame:
    """Nats that one block left out costs on average: front half without block 1, deep half, deep minus front."""
    models = pd.read_csv(HERE / "layer-drop.csv", comment="#")
    cost = models[[str(number) for number in range(1, 25)]].to_numpy()
    models["front"], models["deep"] = cost[:, 1:12].mean(axis=1), cost[:, 12:].mean(axis=1)
    models["deep − front"] = models.deep - models.front
    by = models.groupby(["models", "arm"])[["front", "deep", "deep − front"]]
    found = by.mean().assign(seeds=by.size())
    spread = by.sem()["deep − front"]
    return found.assign(**{"±": stats.t.ppf(0.975, found.seeds - 1) * spread})


# What LNS is: two runs that agree, or do not

WIDTH, BLOCKS, VOCABULARY, RATE, DECAY, EPS = 16, 4, 11, 1e-2, 0.1, 1e-8
#: Where block l multiplies by s(l): at what reads the norms (q and k, v, gate and up) or at the attention branch.
PLACES = {"lns": ("qk", "v", "ff"), "value": ("v", "ff"), "branch": ("branch", "ff"), "preln": ()}


def model(form: str, bias: bool = False, qk_norm: bool = False, undo: bool = False) -> Any:
    """Four blocks of RMSNorm, attention and SwiGLU in fp64, drawn from seed 0.

    :param form: a key of :data:`PLACES`. :param undo: the softmax scale of block l times l.
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.s = number**-0.5
            self.at = {place: self.s if place in PLACES[form] else 1.0 for place in ("qk", "v", "ff", "branch")}
            self.scale = WIDTH**-0.5 * (number if undo else 1)
            self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
            self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(2))
            self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.rms_norm(x, (WIDTH,), self.gains[0], 1e-6)
            q, k, v = self.q(self.at["qk"] * y), self.k(self.at["qk"] * y), self.v(self.at["v"] * y)
            if qk_norm:  # without an epsilon, as the statement has it
                q, k = (h / h.square().mean(-1, keepdim=True).sqrt() for h in (q, k))
            attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            x = x + self.at["branch"] * self.o(attention)
            y = self.at["ff"] * F.rms_norm(x, (WIDTH,), self.gains[1], 1e-6)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.blocks = nn.ModuleList(Block(number) for number in range(1, BLOCKS + 1))
            self.double()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(F.rms_norm(x, (WIDTH,), eps=1e-6))

    return Model()


OWNED = {"gains": ("gains",), "readers": ("q", "k", "v", "gate", "up"), "": ()}


def train(net: Any, owned: str = "", rate: float = 1.0, sgd: bool = False) -> np.ndarray:
    """Losses of 100 steps; the parameters of :data:`OWNED` start at s and learn at rate s**rate."""
    import torch

    def mine(name: str) -> bool:
        return any(part in OWNED[owned] for part in name.split("."))

    groups = [{"params": [p for n, p in net.named_parameters() if not mine(n)]}]
    for block in net.blocks if owned else ():
        parameters = [p for n, p in block.named_parameters() if mine(n)]
        with torch.no_grad():
            torch._foreach_mul_(parameters, block.s)
        own = {} if sgd else {"weight_decay": DECAY / block.s, "eps": EPS / block.s}
        groups.append({"params": parameters, "lr": RATE * block.s**rate, **own})
    optimizer = torch.optim.SGD(groups, RATE) if sgd else torch.optim.AdamW(groups, RATE, eps=EPS, weight_decay=DECAY)
    losses = []
    for step in range(100):
        ids = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step)).sort(-1).values
        loss = torch.nn.functional.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


#: Statement, whether the two runs agree, first run, second run.
STATEMENTS: list[tuple[str, bool, Callable[[], np.ndarray], Callable[[], np.ndarray]]] = [
    ("LNS = gains from s, rate s x lr", True, lambda: train(model("lns")), lambda: train(model("preln"), "gains")),
    ("LNS = q, k, v, gate, up from s, rate s x lr", True,
     lambda: train(model("lns")), lambda: train(model("preln"), "readers")),
    ("SGD: LNS = gains from s, rate s^2 x lr", True,
     lambda: train(model("lns"), sgd=True), lambda: train(model("preln"), "gains", 2.0, sgd=True)),
    ("SGD: rate s x lr is not enough", False,
     lambda: train(model("lns"), sgd=True), lambda: train(model("preln"), "gains", sgd=True)),
    ("lnsvalue = LNS with the softmax scale x l", True,
     lambda: train(model("value")), lambda: train(model("lns", undo=True))),
    ("lnsvalue = factor on v = factor on the attention branch", True,
     lambda: train(model("value")), lambda: train(model("branch"))),
    ("with biases v and the branch differ", False,
     lambda: train(model("value", bias=True)), lambda: train(model("branch", bias=True))),
    ("with QK-norm LNS = lnsvalue", True,
     lambda: train(model("lns", qk_norm=True)), lambda: train(model("value", qk_norm=True))),
    ("with QK-norm and biases they differ", False,
     lambda: train(model("lns", True, True)), lambda: train(model("value", True, True))),
]  # fmt: skip


def equivalences() -> None:
    """Print the largest difference of the losses for every statement.

    :raises SystemExit: a pair that agrees differs by more than 1e-10, or one that does not agrees to 1e-6.
    """
    wrong = []
    for statement, agree, one, other in STATEMENTS:
        gap = np.abs(one() - other()).max()
        if not (gap < 1e-10 if agree else gap > 1e-6):
            wrong.append(statement)
        print(f"{statement:58}  {gap:.0e}")
    gate, up = np.random.default_rng(0).standard_normal((2, 1_000_000))
    ratio = np.std(0.354 * gate / (1 + np.exp(-0.354 * gate)) * 0.354 * up) / np.std(gate / (1 + np.exp(-gate)) * up)
    print(f"SwiGLU of normal gate and up x 0.354: standard deviation x {ratio:.3f}; s^2 = {0.354**2:.3f}")
    print(f"mean of 1/sqrt(l) over 24 blocks: {np.mean(np.arange(1, 25) ** -0.5):.3f}")
    if wrong:
        raise SystemExit(f"not as stated: {'; '.join(wrong)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("published", "ours", "rates", "removal", "equivalences"))
    parser.add_argument("--figure", type=Path, default=HERE / "contrast.png")
    args = parser.parse_args()
    if args.what == "published":
        rows = published()
        print(rows.drop(columns="place").round(3).to_string(index=False))
        draw(rows, args.figure)
        print(f"wrote {args.figure}")
    elif args.what == "ours":
        runs = read()
        print(f"{len(runs)} runs, {runs.trajectory.nunique()} independent trajectories")
        print(contrasts(runs).round(3).to_string(index=False))
        print(
            "\nE1 at 16 tokens a parameter, its six contrasts:\n", planned(runs).round(4).to_string(index=False), sep=""
        )
    elif args.what == "rates":
        for key, setting in read().query("not trunk").groupby(SETTING):
            seed, best = choose(setting, together := key[0] in SCREENINGS)
            print(f"\n{dict(zip(SETTING, key, strict=True))}; {'the mean' if together else f'seed {seed}'} chooses")
            print(best.round(4).to_string())
            print(setting.groupby(["arm", "learning_rate"]).nats.agg(["mean", "std", "count"]).round(4).to_string())
    elif args.what == "removal":
        print(removal().round(3).to_string())
    else:
        equivalences()


if __name__ == "__main__":
    main()
