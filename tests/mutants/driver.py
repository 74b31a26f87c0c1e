"""Judge the package on one mutant, in a process that has imported the framework and not the package.

Outcomes: ``agrees`` with hooks on the mutated upstream, ``refused`` by an error of the package, ``differs``, ``crashed`` by
any other error, ``invalid`` where the mutated upstream does not run or is not another. :func:`check` is what the tests call.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from mutants.routes import FRAMEWORKS
from mutants.source import locate
from mutants.table import MUTANTS
from support import forked
from support.hooked import drawn_plain, hooked

TOLERANCE = 1e-5
TESTS = Path(__file__).parents[1]
#: Code that the process of all mutants runs before it forks one for each.
FIRST = f"""
import os, sys
os.environ["OLMO_LNS_DISABLE"] = "1"
sys.path.append({str(TESTS)!r})
from mutants import driver
driver.import_frameworks()
"""


def import_frameworks(names=("olmo", "megatron", "transformers", "gpt2", "olmo_core")):
    """Import what the mutants change, of the frameworks that are installed."""
    for row in (FRAMEWORKS[name] for name in names):
        with contextlib.suppress(ModuleNotFoundError):
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


def refer(row, mutant, framework, model, first):
    """Put the factor on the stock model: in the gains, or by hooks."""
    blocks = list(row.blocks(model))
    if not mutant.folded:
        hooked(model, blocks, mutant.names.get(framework, row.norms), numbers=range(first, first + len(blocks)))
        return
    for number, block in enumerate(blocks, start=first):
        for name in row.norms:
            block.get_submodule(name).weight.data.mul_(number**-0.5)


def judge(framework, mutant, rank):
    """Outcome and detail of one mutant, in this process."""
    row = FRAMEWORKS[framework]()
    before = row.stock()
    drawn = spread(before)
    computed = output(row, perturb(before))
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
        importlib.import_module(f"olmo_lns.integrations.{row.package}").register()
        model, expected = row.scheme(), row.stock()
        if depth := mutant.depth.get(framework, row.depth):
            projections = mutant.projections.get(framework, row.projections)
            drawn_plain(expected, depth, list(row.blocks(expected)), projections)
        found, plain = spread(model), spread(expected)
        wrong = {name: (found[name], plain[name]) for name in plain if abs(found[name] / plain[name] - 1) > 0.12}
        if wrong:
            return "differs", f"drawn at another standard deviation (found, expected): {wrong}"
        expected.load_state_dict(perturb(model).state_dict())
        unscaled = output(row, expected)
        refer(row, mutant, framework, expected, first=1 + 2 * rank)
        wanted = output(row, expected)
        if not difference(wanted, unscaled) > 100 * TOLERANCE:
            return "invalid", "the reference's factors change nothing"
        error = difference(output(row, model), wanted)
        return ("agrees", f"{error:.1e}") if error < TOLERANCE else ("differs", f"off by {error:.1e}")
    except Exception as error:
        if any(isinstance(each, LNSError) for each in (error, error.__cause__, error.__context__)):
            return "refused", str(error)
        return "crashed", traceback.format_exc()


def main(framework, name):
    """Print the outcome of this process, a rank of Megatron's where torchrun started it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    with contextlib.ExitStack() as stack:
        if framework == "megatron":
            from support import megatron_cpu

            stack.enter_context(megatron_cpu.cuda_answered())
            megatron_cpu.initialize(pp=mutant.ranks)
        import_frameworks([framework])
        outcome = judge(framework, mutant, int(os.environ.get("RANK", 0)))
        print(f"\nOUTCOME {json.dumps(outcome)}\n", end="", flush=True)


def cases(*frameworks):
    """A parameter of a test for each mutant of these frameworks."""
    return [
        pytest.param(
            framework, mutant, id=f"{framework}-{mutant.name}",
            marks=[pytest.mark.slow] * (mutant.ranks > 1),
        )
        for framework in frameworks for mutant in MUTANTS if framework in mutant.apply
    ]  # fmt: skip


def check(framework, mutant):
    """Fail unless the package followed the mutant, or, where that may be, refused it."""
    if mutant.ranks > 1:
        variables = {"OLMO_LNS_DISABLE": "1", "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mutant.ranks)]
        command = [sys.executable, "-W", "ignore", *launcher, "-m", "mutants.driver", framework, mutant.name]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=600)
    else:
        code = f"from mutants.driver import main; main({framework!r}, {mutant.name!r})"
        done = forked.run(code, first=FIRST, OLMO_LNS_DISABLE="1")
    outcomes = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    allowed = ("agrees",) if mutant.followed else ("agrees", "refused")
    wrong = [(outcome, detail) for outcome, detail in outcomes if outcome not in allowed]
    if wrong or len(outcomes) != mutant.ranks:
        pytest.fail(f"expected {' or '.join(allowed)}: {wrong or done.stderr[-3000:]}", pytrace=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
