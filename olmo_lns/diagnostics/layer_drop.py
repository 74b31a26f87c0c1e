"""What removing one block costs, without fine-tuning: in loss, and in scores of lm-evaluation-harness tasks.

The block is bypassed where it stands: its input becomes its output. The other blocks keep their place
and so their layer numbers: taking a block out of the list would shift every later LNS factor.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, block_input, by_block, first_tensor, run, token_loss
from olmo_lns.errors import LNSError, one_line
from olmo_lns.models.loading import LoadedModel
from olmo_lns.models.structure import body_forward, find_blocks, in_vision, is_vision_language, logits_of

__all__ = ["LayerDropResult", "TaskScores", "bypassed", "drop_layers", "output_lengths", "score_tasks"]


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
def output_lengths(blocks: Sequence[nn.Module]) -> Iterator[list[int]]:
    """The length of the tuple that each block returns (0 = a bare tensor), filled in by what runs inside.

    :raises LNSError: a block did not run: what it costs to remove cannot be asked of this data.
    """
    lengths = [-1] * len(blocks)

    def hook(index: int, output: Any) -> None:
        first_tensor(output)  # raises on anything else
        lengths[index] = 0 if isinstance(output, torch.Tensor) else len(output)

    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            handle = block.register_forward_hook(lambda _, __, output, index=index: hook(index, output))
            stack.callback(handle.remove)
        yield lengths
    if -1 in lengths:
        raise LNSError(
            f"block {lengths.index(-1) + 1} did not run on this data: the vision branch of a model runs on records "
            "with an image (see --image-field) only"
        )


@contextmanager
def bypassed(block: nn.Module, length: int) -> Iterator[None]:
    """Inside, ``block`` returns its input, as a tensor (``length`` 0) or at the head of a tuple of Nones."""

    def identity(*args: Any, **kwargs: Any) -> Any:
        hidden = block_input(args, kwargs)
        return (hidden, *[None] * (length - 1)) if length else hidden

    own = block.__dict__.get("forward")  # accelerate puts its hook of a device_map there
    block.forward = identity
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


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
    lengths: list[int] = []
    sums: list[torch.Tensor] = []  # of each sequence: (models, sequences); and its number of tokens
    counts: list[torch.Tensor] = []

    def one_batch(ids: torch.Tensor, mask: torch.Tensor | None, **pictures: torch.Tensor) -> None:
        if not lengths:
            with output_lengths(blocks) as found, torch.no_grad():
                body_forward(model)(ids if pictures else ids[:1], None, **pictures)
            lengths.extend(found)
        nll, valid = loss(ids, mask, **pictures)
        rows = [_per_sequence(nll, valid)]
        if not bool(torch.isfinite(rows[0]).all()):
            raise LNSError("the loss of the whole model is not finite: run `olmo-lns analyze variance` to see where")
        for number, (block, length) in enumerate(zip(blocks, lengths, strict=True), start=1):
            with bypassed(block, length):
                rows.append(_per_sequence(*loss(ids, mask, **pictures)))
            if not bool(torch.isfinite(rows[-1]).all()):
                raise LNSError(f"the loss without block {number} is not finite: try --dtype fp32 or bf16")
        sums.append(torch.stack(rows))
        counts.append(valid.sum(1).double().cpu())

    images = is_vision_language(getattr(model, "config", None))
    for _ in run(model, batches, device, one_batch, with_images=images):
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
    loaded: LoadedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    metric: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
    batch_size: int = 8,
) -> dict[str, TaskScores]:
    """Run ``tasks`` on the whole model, then without each block in turn.

    :param include_path: folder with task files of your own. :param metric: by default the first of
        acc_norm, acc, exact_match and f1 that a task reports, else its first one.
    :param limit: examples a task, None for all.
    :raises LNSError: lm-eval is missing, a task is unknown, or it reports no such metric.
    """
    if tokenizer.eos_token_id is None:
        raise LNSError("evaluation tasks need a tokenizer with an end-of-text token: found none, see --tokenizer")
    lm = _harness_model(loaded, tokenizer, batch_size)
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

    with output_lengths(loaded.blocks) as lengths:
        runs = [evaluate()]
    for block, length in zip(loaded.blocks, lengths, strict=True):
        with bypassed(block, length):
            runs.append(evaluate())
    return {task: _collect(task, [run[task] for run in runs], metric) for task in runs[0] if task in tasks}


def _harness_model(loaded: LoadedModel, tokenizer: Any, batch_size: int) -> Any:
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise LNSError(f"tasks need lm-eval and accelerate: pip install 'olmo-lns[eval]' ({error})") from None
    model: Any = loaded.model if loaded.kind == "huggingface" else _as_huggingface(loaded)
    # A removed block would leave its slot of the key-value cache empty, and the cache's length is read from block 1.
    model.config.use_cache = False
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.use_cache = False
    kind, options = HFLM, {"tokenizer": tokenizer, "backend": "causal"}
    if loaded.reads_images:
        from lm_eval.models.hf_vlms import HFMultimodalLM

        kind, options = HFMultimodalLM, {"tokenizer": None}  # given one it forgets it; it loads the model's own
        _never_cached(loaded)
    options |= {"batch_size": batch_size, "max_length": loaded.max_length, "device": str(loaded.device)}
    try:
        return kind(pretrained=model, **options)
    except (ValueError, TypeError, AttributeError) as error:
        raise LNSError(f"lm-eval cannot use this model: {one_line(error)}") from error


def _never_cached(loaded: LoadedModel) -> None:
    """The harness's multimodal models ask for the cache by name; without a vision block it is whole and stays."""
    model: Any = loaded.model
    if in_vision(next(name for name, module in model.named_modules() if module is loaded.blocks[0])):
        return
    generate = model.generate
    model.generate = lambda *args, **kwargs: generate(*args, **{**kwargs, "use_cache": False})


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

    config = transformers.PretrainedConfig(
        vocab_size=loaded.vocabulary, max_position_embeddings=loaded.max_length, num_hidden_layers=len(loaded.blocks)
    )
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
