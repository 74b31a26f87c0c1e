"""Record what Megatron's own parser makes of each flag that describes the architecture.

``MEGATRON_LM_SRC=CHECKOUT python tests/export/programs/record_megatron_arguments.py`` prints one JSON object. It
maps a case to the arguments that the exporter reads and that differ from the first case's, after Megatron's validation,
or to null where this version has no such flag. ``--write`` puts it into ``tests/support/megatron_arguments.json``,
``--save FILE`` saves the whole namespace of the first case as Megatron does.
"""

import contextlib
import io
import json
import os
import sys
import typing
from pathlib import Path

import typing_extensions

if not hasattr(typing, "override"):  # Megatron from 0.18 on declares Python 3.12
    typing.override = typing_extensions.override
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
RECORDED = Path(__file__).resolve().parents[2] / "support" / "megatron_arguments.json"

#: The model of ``support.megatron_tiny``.
BASE = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --transformer-impl local "
    "--no-persist-layer-norm --layernorm-scaling"
)


def flags_of(case):
    """``BASE`` with the flags of a case; ``-name`` removes ``--name`` from it."""
    from support.megatron_saved import FLAGS

    words, added = BASE.split(), FLAGS[case].split()
    for word in [word for word in added if not word.startswith("--") and word.startswith("-")]:
        added.remove(word)
        words.remove(f"-{word}")
    return words + added


def record():
    """Megatron Core's version (two numbers), the cases, and the whole namespace of the first."""
    from support.megatron_saved import FLAGS, names_read

    from olmo_lns.errors import LNSConfigError
    from olmo_lns.study.engines import megatron

    parsed = {}
    for case in FLAGS:
        flags = flags_of(case)
        try:
            parsed[case] = megatron.parse(flags, validate=False)
        except LNSConfigError:  # no such flag, or no such value of it, in this version
            parsed[case] = None
            continue
        with contextlib.suppress(OSError):  # one case names a file that does not exist
            parsed[case] = megatron.parse(flags)
    from megatron import core

    names = sorted({name for case in ("base", "gqa") for name in names_read(parsed[case])})
    found = {}
    for case, args in parsed.items():
        values = None if args is None else {name: getattr(args, name) for name in names if hasattr(args, name)}
        values = json.loads(json.dumps(values))
        if values is not None and case != "base":
            values = {name: value for name, value in values.items() if value != found["base"].get(name)}
        found[case] = values
    return ".".join(core.__version__.split(".")[:2]), found, parsed["base"]


def main():
    sys.path.insert(0, str(RECORDED.parents[1]))
    with contextlib.redirect_stdout(io.StringIO()):
        version, found, namespace = record()
    if "--write" in sys.argv:
        recorded = json.loads(RECORDED.read_text()) | {version: found}
        sections = []
        for name in ("flags", *sorted(set(recorded) - {"flags"})):
            cases = [f"  {json.dumps(case)}: {json.dumps(values)}" for case, values in recorded[name].items()]
            sections.append(f" {json.dumps(name)}: {{\n" + ",\n".join(cases) + "\n }")
        RECORDED.write_text("{\n" + ",\n".join(sections) + "\n}\n")
    if "--save" in sys.argv:
        import torch

        torch.save({"args": namespace}, sys.argv[sys.argv.index("--save") + 1])
    print(json.dumps({version: found}))


if __name__ == "__main__":
    main()
