"""Score lm-evaluation-harness tasks without each block in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.layer_drop import bypassed
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.errors import LNSError
from olmo_lns.temporary_values import replaced_attribute

if TYPE_CHECKING:
    from olmo_lns.export.checkpoint import OpenCheckpoint

#: Metrics in order of preference.
PREFERRED_METRICS = ("acc_norm", "acc", "exact_match", "f1")
#: Task -> ``metric``, ``score`` and ``stderr``: lists with the whole model first, then without block 1, 2 and so on.
Scores = dict[str, dict[str, Any]]


def score_tasks(
    lm: Any,
    blocks: Sequence[nn.Module],
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
) -> Scores:
    """Run ``tasks`` on the whole model, then without each block in turn.

    :param lm: model of lm-eval, for example from :func:`harness_model`.
    :param blocks: blocks of the model, in order.
    :param include_path: folder with the user's task files.
    :param limit: number of examples per task. None uses all.
    :returns: scores by the first of acc_norm, acc, exact_match and f1 that a task reports, else by its first metric.
    :raises LNSError: if a task is unknown, or reports no number.
    :raises OSError: if the data of a task cannot be loaded.

    Example: ``score_tasks(HFLM(pretrained=model, tokenizer=tokenizer), model.model.layers, ["arc_easy"])``.
    """
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.tasks import TaskManager

    # Indexing the thousands of task files of the harness takes a minute: skip it if the user's tasks suffice.
    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if manager is None or any(task not in manager.all_tasks for task in tasks):
        manager = TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise LNSError(
            f"lm-eval has no task {', '.join(unknown)}. `lm_eval --tasks list` lists its tasks. Correct the name, or "
            "pass the folder of your tasks with --task-path."
        )
    options: dict[str, Any] = {"task_manager": manager, "log_samples": False, "bootstrap_iters": 1000}
    options |= {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": chat_template}

    @torch.no_grad()
    def evaluate() -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = simple_evaluate(model=lm, tasks=list(tasks), **options)["results"]
        return results

    # After each run lm-eval would describe the environment, with `pip list`, which takes seconds for every block.
    with replaced_attribute(evaluator, "add_env_info", lambda results: None):
        runs = [evaluate()]
        for block in blocks:
            with bypassed(block):
                runs.append(evaluate())
    return {task: _collect(task, [run[task] for run in runs]) for task in runs[0] if task in tasks}


def _collect(task: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collect the scores of one metric, key ``metric,filter``, and its errors, key ``metric_stderr,filter``."""
    numbers = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
    keys = [key for key in numbers if "," in key and "_stderr" not in key]
    if not keys:
        raise LNSError(
            f"Task {task} reports no number. Expected a metric, such as {', '.join(PREFERRED_METRICS)}. Use another "
            "task."
        )
    preferred = [key for metric in PREFERRED_METRICS for key in keys if key.split(",")[0] == metric]
    score_key = (preferred or keys)[0]
    metric, _, filter_name = score_key.partition(",")
    errors = [run.get(f"{metric}_stderr,{filter_name}") for run in runs]
    stderr = [float(error) if isinstance(error, (int, float)) else None for error in errors]
    return {"metric": metric, "score": [float(run[score_key]) for run in runs], "stderr": stderr}


def with_tasks(result: Measurement, scores: Scores) -> Measurement:
    """Add the columns ``<task>:<metric>``, ``:stderr`` and ``:drop`` for each task to a layer-drop result."""
    columns = dict(result.blocks)
    for name, task in scores.items():
        baseline, *scores_without = task["score"]
        columns[f"{name}:{task['metric']}"] = scores_without
        columns[f"{name}:stderr"] = task["stderr"][1:]
        columns[f"{name}:drop"] = [baseline - score for score in scores_without]
    return replace(result, blocks=columns, details={**result.details, "tasks": scores})


def harness_model(opened: OpenCheckpoint, tokenizer: Any, batch_size: int) -> Any:
    """Wrap an opened model for lm-eval.

    :raises LNSError: if the model is not a Hugging Face model, or the tokenizer has no end-of-text token.
    """
    from transformers import PreTrainedModel

    if not isinstance(opened.model, PreTrainedModel):
        raise LNSError(
            "--tasks: the model is not a Hugging Face model. lm-eval needs one. `olmo-lns export CHECKPOINT FOLDER` "
            "makes one from a checkpoint."
        )
    if tokenizer.eos_token_id is None:
        raise LNSError(
            "--tasks: the tokenizer has no end-of-text token. lm-eval needs one. Pass another tokenizer with "
            "--tokenizer."
        )
    from lm_eval.models.huggingface import HFLM

    options = {"batch_size": batch_size, "max_length": opened.max_length, "device": str(opened.model.device)}
    return HFLM(pretrained=opened.model, tokenizer=tokenizer, backend="causal", **options)
