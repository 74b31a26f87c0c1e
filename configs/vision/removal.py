"""Score a vision-language model without each of its blocks, without fine-tuning (arXiv 2502.05795, appendix C).

    python configs/vision/removal.py Qwen/Qwen2.5-VL-7B-Instruct --blocks model.visual.blocks --tasks mmmu_val -o vision.csv
    python configs/vision/removal.py Qwen/Qwen2.5-VL-7B-Instruct --blocks model.language_model.layers --tasks mmmu_val -o language.csv

lm-evaluation-harness loads the model and its processor, makes the prompts and scores the answers. The CSV file has one row for
each block. Block 0 is the whole model. The extras `vision` and `eval` must be installed.
"""  # noqa: E501

from __future__ import annotations

import argparse
from pathlib import Path

import pandas
from lm_eval.models.hf_vlms import HFMultimodalLM

from olmo_lns.diagnostics.tasks import score_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="Hugging Face folder or name")
    parser.add_argument("--blocks", required=True, help="dotted path of the list of blocks in the model")
    parser.add_argument("--tasks", required=True, help="lm-evaluation-harness tasks, comma-separated")
    parser.add_argument("--task-path", help="folder with task files of your own")
    parser.add_argument("--limit", type=int, help="examples a task; default all")
    parser.add_argument("--num-fewshot", type=int, help="examples in the prompt")
    parser.add_argument("--no-chat-template", action="store_true", help="the prompts as the task has them")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--output", type=Path, required=True, help="CSV file")
    args = parser.parse_args()
    options = {"batch_size": args.batch_size, "dtype": args.dtype, "device": args.device}
    lm = HFMultimodalLM(pretrained=args.model, max_images=2, convert_img_format=True, **options)
    blocks = list(lm.model.get_submodule(args.blocks).children())
    found = score_tasks(
        lm,
        blocks,
        args.tasks.split(","),
        include_path=args.task_path,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        chat_template=not args.no_chat_template,
    )
    scores = {f"{name}:{task['metric']}": task["score"] for name, task in found.items()}
    table = pandas.DataFrame(scores).rename_axis("block")
    table.to_csv(args.output)
    print(table.to_string())


if __name__ == "__main__":
    main()
