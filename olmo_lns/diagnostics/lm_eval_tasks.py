"""Scores of lm-evaluation-harness tasks with each block removed, on the model in memory."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from olmo_lns.diagnostics.layer_drop import TaskScores, bypassed, output_lengths
from olmo_lns.errors import LNSError, one_line
from olmo_lns.models.blocks import in_vision, logits_of
from olmo_lns.models.loading import LoadedModel

__all__ = ["score_tasks"]

#: Read first, if a task reports several metrics.
PREFERRED = ("acc_norm", "acc", "exact_match", "f1")


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
