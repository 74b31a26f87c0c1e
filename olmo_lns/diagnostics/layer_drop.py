"""The cost of removing one block without fine-tuning, in loss and in scores of lm-evaluation-harness tasks.

The block is bypassed where it stands: its input becomes its output. The other blocks keep their place and
their layer numbers. Taking a block out of the list would shift every later LNS factor.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence
from unittest import mock

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, block_input, by_block, first_tensor, run, token_loss
from olmo_lns.errors import LNSError, one_line
from olmo_lns.models.loading import LoadedModel
from olmo_lns.models.structure import find_blocks, logits_of

#: Metrics of which the first one that a task reports is read.
PREFERRED = ("acc_norm", "acc", "exact_match", "f1")


@dataclass(frozen=True)
class TaskScores:
    """One metric of one evaluation task: of the whole model and without each block, block 1 first."""

    metric: str
    baseline: float
    baseline_stderr: float | None
    without: list[float]
    without_stderr: list[float | None]

    @property
    def drop(self) -> list[float]:
        """Performance drop, score of the whole model minus score without the block."""
        return [self.baseline - score for score in self.without]


@dataclass(frozen=True)
class LayerDropResult:
    """Losses in nats per token, block 1 first.

    :param loss_stderr: standard error of (loss without the block - loss), sequences being the paired samples.
    :param tokens: predicted tokens. :param tasks: scores by task name.
    """

    baseline_loss: float
    loss: list[float]
    loss_stderr: list[float | None]
    tokens: int
    tasks: dict[str, TaskScores] = field(default_factory=dict)

    @property
    def increase(self) -> list[float]:
        """Loss without the block minus loss of the whole model."""
        return [loss - self.baseline_loss for loss in self.loss]

    def frame(self) -> Any:
        """A pandas table with a row per removed block; block 0 is the whole model."""
        losses = [self.baseline_loss, *self.loss]
        columns: dict[str, Any] = {
            "loss": losses,
            "perplexity": [math.exp(min(loss, 700.0)) for loss in losses],  # a removed block can ruin a model
            "loss_increase": [0.0, *self.increase],
            "loss_increase_stderr": [None, *self.loss_stderr],
        }
        for name, task in self.tasks.items():
            columns[f"{name}:{task.metric}"] = [task.baseline, *task.without]
            columns[f"{name}:stderr"] = [task.baseline_stderr, *task.without_stderr]
            columns[f"{name}:drop"] = [0.0, *task.drop]
        return by_block(columns, first=0)


@contextmanager
def bypassed(block: nn.Module) -> Iterator[None]:
    """Inside, ``block`` runs, which fills its slot of a key-value cache, and then returns its input.

    :raises LNSError: it did not run: what it costs to remove cannot be asked of this data.
    """
    ran = False

    def give_input(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal ran
        ran = True
        first_tensor(output)  # raises on what no diagnostic can read
        hidden = block_input(args, kwargs)
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    handle = block.register_forward_hook(give_input, with_kwargs=True)
    try:
        with mock.patch.object(block, "_compiled_call_impl", None):  # compiled code does not see a later hook
            yield
    finally:
        handle.remove()
    if not ran:
        raise LNSError("a block did not run on this data: remove blocks that do, or give data for it")


def drop_layers(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
    *,
    mask_token: int | None = None,
) -> LayerDropResult:
    """Loss on ``batches`` of the whole model and without each block in turn, in one pass over the data.

    Costs L + 1 forward passes a batch. Parameters as in ``block_output_variance``;
    ``mask_token`` is for encoders (see :func:`~olmo_lns.diagnostics.capture.token_loss`).

    :raises LNSError: no token, or a loss that is not finite.

    Example: ``drop_layers(model, None, [torch.arange(64)[None]]).loss`` has one number per removed block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    loss = token_loss(model, mask_token)
    sums: list[torch.Tensor] = []  # of each sequence: (models, sequences); and its number of tokens
    counts: list[torch.Tensor] = []

    def one_batch(ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        nll, valid = loss(ids, mask)
        rows = [_per_sequence(nll, valid)]
        if not bool(torch.isfinite(rows[0]).all()):
            raise LNSError("the loss of the whole model is not finite: run `olmo-lns analyze variance` to see where")
        for number, block in enumerate(blocks, start=1):
            with bypassed(block):
                rows.append(_per_sequence(*loss(ids, mask)))
            if not bool(torch.isfinite(rows[-1]).all()):
                raise LNSError(f"the loss without block {number} is not finite: try --dtype fp32 or bf16")
        sums.append(torch.stack(rows))
        counts.append(valid.sum(1).double().cpu())

    for _ in run(model, batches, device, one_batch):
        pass
    count = torch.cat(counts)
    if not (tokens := int(count.sum())):
        raise LNSError("the data holds no token to predict: sequences need at least two tokens")
    nll = torch.cat(sums, dim=1)
    mean = (nll.sum(1) / tokens).tolist()
    return LayerDropResult(mean[0], mean[1:], _paired_stderr(nll[1:] - nll[0], count), tokens)


def _per_sequence(nll: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return nll.masked_fill(~valid.to(nll.device), 0).sum(1).double().cpu()


def _paired_stderr(difference: torch.Tensor, count: torch.Tensor) -> list[float | None]:
    """Of the ratio sum(difference) / sum(count) over sequences, by its linearisation; None for a single sequence.

    :param difference: (blocks, sequences). :param count: (sequences,) tokens.
    """
    if (sequences := int((count > 0).sum())) < 2:
        return [None] * len(difference)
    ratio = difference.sum(1, keepdim=True) / count.sum()
    squares = ((difference - ratio * count) ** 2).sum(1)
    stderr: list[float | None] = ((squares * sequences / (sequences - 1)).sqrt() / count.sum()).tolist()
    return stderr


def score_tasks(
    lm: Any,
    blocks: Sequence[nn.Module],
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    metric: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
) -> dict[str, TaskScores]:
    """Run ``tasks`` on the whole model, then without each block in turn.

    :param lm: lm-eval's model, such as :func:`harness_model` makes. :param blocks: those of its model, in order.
    :param include_path: folder with task files of your own. :param metric: by default the first of
        acc_norm, acc, exact_match and f1 that a task reports, else its first one.
    :param limit: examples a task, None for all.
    :raises LNSError: a task is unknown, its data cannot be had, or it reports no such metric.

    Example: ``score_tasks(HFLM(pretrained=model, tokenizer=tokenizer), find_blocks(model), ["arc_easy"])``.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # Indexing the harness's thousands of task files takes a minute: only for tasks that are not the user's own.
    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if manager is None or any(task not in manager.all_tasks for task in tasks):
        manager = TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise LNSError(f"lm-eval knows no task {', '.join(unknown)}: see `lm_eval --tasks list`, or give --task-path")
    settings = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": chat_template}

    @torch.no_grad()
    def evaluate() -> dict[str, dict[str, Any]]:
        how = {"task_manager": manager, "log_samples": False, "bootstrap_iters": 1000, **settings}
        try:
            found: dict[str, dict[str, Any]] = simple_evaluate(model=lm, tasks=list(tasks), **how)["results"]
        except OSError as error:  # a data set that is neither here nor to be reached
            raise LNSError(
                f"--tasks {','.join(tasks)}: their data cannot be loaded ({one_line(error)}): run once with a network, "
                "or give --task-path with tasks whose files are here"
            ) from error
        return found

    runs = [evaluate()]
    for block in blocks:
        with bypassed(block):
            runs.append(evaluate())
    return {task: _collect(task, [run[task] for run in runs], metric) for task in runs[0] if task in tasks}


def harness_model(loaded: LoadedModel, tokenizer: Any, batch_size: int) -> Any:
    """lm-eval's model around a loaded one.

    :raises LNSError: lm-eval cannot use it, or the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise LNSError("evaluation tasks need a tokenizer with an end-of-text token: found none, see --tokenizer")
    from lm_eval.models.huggingface import HFLM

    model: Any = loaded.model if loaded.kind == "huggingface" else _as_huggingface(loaded)
    options = {"batch_size": batch_size, "max_length": loaded.max_length, "device": str(loaded.device)}
    try:
        return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", **options)
    except (ValueError, TypeError, AttributeError) as error:
        raise LNSError(f"lm-eval cannot use this model: {one_line(error)}") from error


def _as_huggingface(loaded: LoadedModel) -> Any:
    """OLMo's or OLMo-core's model behind the few names that the harness reads; nothing is converted or copied."""
    import transformers
    from transformers.modeling_outputs import CausalLMOutput

    logits = logits_of(loaded.model)

    class OLMoForHarness(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.olmo = loaded.model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> Any:
            if attention_mask is not None and bool(attention_mask.all()):
                attention_mask = None
            return CausalLMOutput(logits=logits(input_ids, attention_mask))

    sizes = {"max_position_embeddings": loaded.max_length, "num_hidden_layers": len(loaded.blocks)}
    config = transformers.PretrainedConfig(vocab_size=loaded.vocabulary, use_cache=False, **sizes)
    return OLMoForHarness(config).eval()


def _collect(task: str, runs: Sequence[dict[str, Any]], metric: str | None) -> TaskScores:
    """The scores by one metric, whose key is ``name,filter``; its error's is ``name_stderr,filter``."""
    numbers = [name for name, value in runs[0].items() if isinstance(value, (int, float))]
    keys = [name for name in numbers if "," in name and "_stderr" not in name]
    wanted = [key for want in ([metric] if metric else PREFERRED) for key in keys if key.split(",")[0] == want]
    if not (found := wanted or ([] if metric else keys)):
        raise LNSError(f"task {task} reports {', '.join(keys) or 'no number'}, expected {metric or 'a metric'}")
    name, _, filtered = found[0].partition(",")
    scores = [float(run[found[0]]) for run in runs]
    errors = [run.get(f"{name}_stderr,{filtered}") for run in runs]
    known = [float(error) if isinstance(error, (int, float)) else None for error in errors]
    return TaskScores(name, scores[0], known[0], scores[1:], known[1:])
