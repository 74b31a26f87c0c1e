"""Run one mutant in a fork of an interpreter that has imported its framework and not the package.

Outcomes: ``agrees`` with hooks on the mutated upstream, ``refused`` by an error of the package, ``differs``, ``crashed`` by any
other error, ``invalid`` where the mutated upstream does not run or is not another. The tests call :func:`check`.
"""

import contextlib
import json
import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

import torch

TOLERANCE = 1e-5
#: From the worst on: what is wrong on any rank is wrong.
OUTCOMES = ("invalid", "crashed", "differs", "refused", "agrees")
PREPARE = """
import os, sys
os.environ["OLMO_LNS_DISABLE"] = "1"
sys.path.insert(0, {!r})
from mutants import driver
driver.prepare({!r})
"""
unavailable = ""  # why this interpreter cannot run the mutants of its framework


def prepare(transformer_engine):
    """Import what the mutants change: of the specs with Transformer Engine, which comes before Megatron, or of all others."""
    global unavailable
    from mutants.routes import FRAMEWORKS
    from mutants.source import locate
    from support import te_python

    torch.set_num_threads(1)
    if transformer_engine:
        try:
            te_python.install()
        except te_python.Unavailable as reason:
            unavailable = str(reason)
            return
    for name, row in FRAMEWORKS.items():
        if (name == "megatron_te") == transformer_engine:
            with contextlib.suppress(ImportError):  # not in this environment
                for path in (f"{row.norm}.forward", f"{row.block}.forward", *row.touched):
                    locate(path)


def perturb(model):
    """Gains that differ from each other and from one, and matrices far from the near-identity of the start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("gain_elsewhere"):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.add_(noise, alpha=0.3)
            elif parameter.std() < 0.05:
                parameter.mul_(4.0)
    return model


def spread(model):
    """Standard deviation of each matrix."""
    return {name: float(p.detach().std()) for name, p in model.named_parameters() if p.dim() > 1}


def difference(one, other):
    return float((one - other).abs().max() / other.abs().max())


@torch.no_grad()
def output(row, model):
    return row.output(model).float()


def fold(row, model, gain):
    """The factor in the gains."""
    for number, block in enumerate(row.blocks(model), start=1):
        for name in row.norms:
            getattr(block.get_submodule(name), gain).data.mul_(number**-0.5)


def judge(framework, name, rank=0):
    """Outcome and detail of one mutant, in this process."""
    from mutants.routes import FRAMEWORKS
    from mutants.table import MUTANTS
    from support.hooked import drawn_plain, hooked

    mutant, row = MUTANTS[name], FRAMEWORKS[framework]()
    if mutant.ranks > 1:
        row.how = {"pipeline_model_parallel_size": mutant.ranks}
    before = row.stock()
    drawn, computed = spread(before), output(row, perturb(before))
    try:
        mutant.apply[framework](row)
        after = row.stock()
        seen = spread(after) != drawn or not difference(output(row, perturb(after)), computed) <= TOLERANCE
        if mutant.visible and not seen:
            return "invalid", "the mutated upstream is as it was"
    except Exception:
        return "invalid", traceback.format_exc()
    del os.environ["OLMO_LNS_DISABLE"]
    from olmo_lns.errors import LNSError

    try:
        row.register()
        model, expected = row.scheme(), row.stock()
        if depth := mutant.depth.get(framework, row.depth):
            projections = mutant.projections.get(framework, row.projections)
            drawn_plain(expected, depth, row.blocks(expected), projections)
        found, plain = spread(model), spread(expected)
        wrong = {name: (found[name], plain[name]) for name in plain if abs(found[name] / plain[name] - 1) > 0.12}
        if wrong:
            return "differs", f"drawn at another standard deviation (found, expected): {wrong}"
        perturb(model)
        expected.load_state_dict(model.state_dict())
        unscaled = output(row, expected)
        if mutant.folded or row.folded:
            fold(row, expected, mutant.gain or row.gain)
        else:
            blocks = row.blocks(expected)
            first = 1 + rank * len(blocks)
            hooked(expected, blocks, mutant.names.get(framework, row.norms), numbers=range(first, first + len(blocks)))
        wanted = output(row, expected)
        if not difference(wanted, unscaled) > 100 * TOLERANCE:
            return "invalid", "the reference's factors change nothing"
        error = difference(output(row, model), wanted)
        return ("agrees" if error < TOLERANCE else "differs"), f"off by {error:.1e}"
    except Exception as error:
        if any(isinstance(each, LNSError) for each in (error, error.__cause__, error.__context__)):
            return "refused", str(error)
        return "crashed", traceback.format_exc()


def judge_rank(framework, name, rank, ranks, folder):
    """:func:`judge` with Megatron's parallel state where the framework is Megatron."""
    if not framework.startswith("megatron"):
        return judge(framework, name)
    import torch.distributed as dist
    from support import megatron_cpu

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_cpu.cuda_answered())
        megatron_cpu.initialize(pp=ranks)
        return judge(framework, name, rank)


def main(framework, name):
    """Print the outcome, and what explains it, as the last line."""
    from mutants.table import MUTANTS

    ranks = MUTANTS[name].ranks
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(ranks) as pool:
        each = [(framework, name, rank, ranks, folder) for rank in range(ranks)]
        results = pool.starmap_async(judge_rank, each, chunksize=1).get(timeout=60)
    print("\n" + json.dumps(min(results, key=lambda result: OUTCOMES.index(result[0]))))


def cases(*frameworks):
    """A parameter of a test for each mutant of these frameworks."""
    import pytest
    from mutants.table import MUTANTS

    return [
        pytest.param(
            name,
            each,
            id=f"{name}-{each.name}",
            marks=[] if name in ("olmo_core", "torchtitan") else [pytest.mark.slow],
        )
        for name in frameworks
        for each in MUTANTS.values()
        if name in each.apply
    ]


def check(framework, mutant):
    """Fail unless the package followed the mutant, or, where that may be, refused it."""
    import pytest
    from support import forked

    # PYTHONOPTIMIZE switches off Transformer Engine's assertion that there is a GPU.
    start = {"PYTHONOPTIMIZE": "1", "TORCHDYNAMO_DISABLE": "1"} if framework == "megatron_te" else {}
    first = PREPARE.format(str(Path(__file__).parents[1]), framework == "megatron_te")
    code = "import sys\nfrom mutants import driver\nsys.exit(driver.unavailable or driver.main(*sys.argv[1:]))"
    done = forked.run(code, framework, mutant.name, first=first, start=start, OLMO_LNS_DISABLE="1")
    if "cannot be downloaded" in done.stderr:
        pytest.skip(done.stderr)
    outcome, detail = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else ("crashed", done.stderr)
    allowed = ("agrees",) if mutant.harmless or mutant.followed else ("agrees", "refused")
    allowed = ("refused",) if mutant.refused else allowed
    if outcome not in allowed:
        pytest.fail(f"{outcome}, expected {' or '.join(allowed)}: {detail}", pytrace=False)
