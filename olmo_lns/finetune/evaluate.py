"""``olmo-lns evaluate``: the papers' seven tasks by lm-evaluation-harness, their columns beside.

The papers call them eight; seven are printed, and the averages are over seven. The metric is not
named. ``acc`` is taken: OBQA at 11 to 19 % is below what ``acc_norm`` gives a model that guesses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Mapping, Sequence

from olmo_lns.arguments import at_least
from olmo_lns.diagnostics.results import check_writable
from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["PUBLISHED", "TASKS", "main", "score", "table"]

#: Column -> task of lm-evaluation-harness.
TASKS = {
    "MMLU": "mmlu",
    "BoolQ": "boolq",
    "ARC-e": "arc_easy",
    "PIQA": "piqa",
    "Hella": "hellaswag",
    "OBQA": "openbookqa",
    "Wino": "winogrande",
}
#: After fine-tuning on Commonsense170K (arXiv 2502.05795 and 2412.13795), in percent, in the order of TASKS.
PUBLISHED: Mapping[str, tuple[float, ...]] = {
    "250M Post-LN": (22.95, 37.83, 26.94, 52.72, 26.17, 11.60, 49.56),
    "250M DeepNorm": (23.60, 37.86, 36.62, 61.10, 25.69, 15.00, 49.57),
    "250M Mix-LN": (26.53, 56.12, 41.68, 66.34, 30.16, 18.00, 50.56),
    "250M Pre-LN": (24.93, 38.35, 40.15, 63.55, 26.34, 16.20, 49.01),
    "250M LNS": (27.08, 58.17, 45.24, 67.38, 32.81, 18.80, 52.49),
    "1B Post-LN": (22.95, 37.82, 25.08, 49.51, 25.04, 13.80, 49.57),
    "1B DeepNorm": (23.35, 37.83, 27.06, 52.94, 26.19, 11.80, 49.49),
    "1B Mix-LN (diverged)": (23.19, 37.83, 25.08, 49.51, 25.04, 11.80, 49.57),
    "1B Mix-LN (Mix-LN paper)": (27.99, 61.93, 48.11, 68.50, 31.35, 18.80, 55.93),
    "1B Pre-LN": (26.54, 62.20, 45.70, 67.79, 30.96, 17.40, 50.51),
    "1B LNS": (28.69, 61.80, 48.85, 67.92, 33.94, 18.60, 54.30),
}


def score(
    model: str,
    *,
    few_shot: int | None = 5,
    limit: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    task_path: str | None = None,
    metric: str = "acc",
) -> dict[str, float]:
    """Column -> score in percent of the model in a folder or under a hub name.

    :param device: by default CUDA where there is one.
    :param task_path: folder with tasks under the same names, for example offline copies.
    :raises LNSConfigError: lm-eval is missing, or a task does not report ``metric``.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise LNSConfigError(f"lm-eval cannot be imported ({error}): pip install 'olmo-lns[sft]'") from error
    from olmo_lns.integrations.transformers import register

    register()
    import torch

    # Given None, the harness takes CUDA whether there is one or not.
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    manager = TaskManager(include_path=task_path, include_defaults=task_path is None)
    try:
        found = simple_evaluate(
            model="hf",
            model_args={"pretrained": model},
            tasks=list(TASKS.values()),
            num_fewshot=few_shot,
            limit=limit,
            batch_size=batch_size,
            device=device,
            task_manager=manager,
            bootstrap_iters=0,
        )
    except (OSError, ValueError, KeyError) as error:
        raise LNSConfigError(f"{model}: the tasks could not be run: {one_line(error)}") from error
    return {column: _percent(found["results"], task, metric) for column, task in TASKS.items()}


def _percent(results: Mapping[str, Mapping[str, Any]], task: str, metric: str) -> float:
    value = results[task].get(f"{metric},none")
    if not isinstance(value, (int, float)):
        raise LNSConfigError(f"task {task} reports no {metric}: found {', '.join(map(str, results[task]))}")
    return 100.0 * value


def table(scores: Mapping[str, Mapping[str, float]], published: Sequence[str] = ()) -> str:
    """A Markdown table: models, then the papers' rows of the given names."""
    lines = ["| | " + " | ".join([*TASKS, "avg"]) + " |", "|---" * (len(TASKS) + 2) + "|"]
    rows = {name: [values[column] for column in TASKS] for name, values in scores.items()}
    rows |= {f"paper: {name}": list(PUBLISHED[name]) for name in published}
    for name, values in rows.items():
        cells = [*values, sum(values) / len(values)]
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns evaluate``."""
    parser = argparse.ArgumentParser(prog="olmo-lns evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="model folders or hub names")
    parser.add_argument(
        "--few-shot", type=at_least(0), default=5, help="examples in the prompt (default 5, as OwLore's code)"
    )
    parser.add_argument("--limit", type=at_least(1), help="examples a task, to try it out")
    parser.add_argument("--batch-size", type=at_least(1), default=8, help="default %(default)s")
    parser.add_argument("--device", help="default: CUDA where there is one")
    parser.add_argument("--metric", default="acc", help="default %(default)s; which one the papers took is not known")
    parser.add_argument("--task-path", help="folder with tasks of the same names, instead of the harness' own")
    parser.add_argument("--size", choices=("250M", "1B", "all", "none"), default="all", help="of the papers' rows")
    parser.add_argument("-o", "--output", type=Path, help="also write the scores as JSON")
    args = parser.parse_args(argv)
    if args.output:
        check_writable(args.output, [".json"])
    options = {
        name: getattr(args, name) for name in ("few_shot", "limit", "batch_size", "device", "task_path", "metric")
    }
    scores = {model: score(model, **options) for model in args.models}
    print(table(scores, [name for name in PUBLISHED if args.size == "all" or name.startswith(f"{args.size} ")]))
    if args.limit:
        print(f"\nonly {args.limit} examples a task: no result to compare")
    if args.output:
        args.output.write_text(json.dumps({"settings": options, "scores": scores}, indent=2) + "\n", encoding="utf-8")
    return 0
