"""Run mutants of one framework, each in a fork of a process that has imported the framework and not the package.

``python -m mutants.driver``, started with OLMO_LNS_DISABLE=1, reads lines such as ``olmo norm_times_7`` from stdin and answers
each with a line of JSON, (outcome, detail). Outcomes: ``agrees`` with hooks on the mutated upstream, ``refused`` by an error of the
package, ``differs``, ``crashed`` by any other error, ``invalid`` where the mutated upstream does not run or is not another.
:func:`check` is what the tests call.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

TOLERANCE = 1e-5


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


def blocks(row, model):
    return row.blocks(model) if hasattr(row, "blocks") else None


def reference(row, mutant, framework, first):
    """The stock model under hooks, and how it was drawn."""
    from support.hooked import drawn_plain, hooked, known

    model = row.stock()
    depth = mutant.depth.get(framework, row.depth)
    projections = mutant.projections.get(framework, getattr(row, "projections", None))
    if depth:
        drawn_plain(model, depth, blocks(row, model), projections)
    drawn, names = spread(model), mutant.names.get(framework, row.norms)
    count = len(list(known(model)[0](model) if blocks(row, model) is None else blocks(row, model)))
    numbers = range(first, first + count)
    return model, drawn, lambda: hooked(model, blocks(row, model), names, numbers=numbers)


def fold(row, model, gain):
    """The factor in the gains."""
    from support.hooked import known

    for number, block in enumerate(known(model)[0](model) if known(model) else row.blocks(model), start=1):
        for name in row.norms:
            getattr(block.get_submodule(name), gain).data.mul_(number**-0.5)


def difference(one, other):
    return float((one - other).abs().max() / other.abs().max())


def output(row, model):
    """The output; of the second of two pipeline stages, the hidden states that its layers give."""
    from support import megatron_tiny as tiny

    with torch.no_grad():
        if getattr(model, "pre_process", True) and getattr(model, "post_process", True):
            return row.output(model).float()
        x = torch.randn(tiny.SEQUENCE, tiny.BATCH, tiny.HIDDEN, generator=torch.Generator().manual_seed(2))
        if not model.pre_process:
            model.decoder.set_input_tensor(x)
        mask = torch.triu(torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE, dtype=torch.bool), 1)
        return model.decoder(hidden_states=x, attention_mask=mask).float()


def judge(framework, mutant, rank=0):
    """Outcome and detail of one mutant, in this process."""
    from mutants.routes import FRAMEWORKS

    row = FRAMEWORKS[framework]()
    how = {"pipeline_model_parallel_size": 2} if mutant.ranks == 2 else {}
    if how:
        row.stock = lambda config=None, stock=row.stock: stock(config, **({} if config else how))
        row.scheme = lambda scheme=row.scheme: scheme(**how)
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
        row.register()
        model = row.scheme()
        found = spread(model)
        expected, plain, hook = reference(row, mutant, framework, first=1 + 2 * rank)
        wrong = {name: (found[name], plain[name]) for name in plain if abs(found[name] / plain[name] - 1) > 0.12}
        if wrong:
            return "differs", f"drawn at another standard deviation (found, expected): {wrong}"
        perturb(model)
        expected.load_state_dict(model.state_dict())
        unscaled = output(row, expected)
        folded = mutant.folded or getattr(row, "folded", False)
        fold(row, expected, mutant.gain or getattr(row, "gain", "weight")) if folded else hook()
        if mutant.calls is not None:
            mutant.calls.clear()
        result = output(row, model)
        if mutant.calls is not None and not mutant.calls:
            return "differs", "the wrapper around the norms' forward did not run"
        wanted = output(row, expected)
        if not difference(wanted, unscaled) > 100 * TOLERANCE:
            return "invalid", "the reference's factors change nothing"
        error = difference(result, wanted)
        return ("agrees", f"{error:.1e}") if error < TOLERANCE else ("differs", f"off by {error:.1e}")
    except LNSError as error:
        return "refused", str(error)
    except Exception as error:
        if any(isinstance(e, LNSError) for e in (error.__cause__, error.__context__)):
            return "refused", str(error)
        return "crashed", traceback.format_exc()


def in_child(framework, mutant, rank, file, pipe):
    sys.stdout = sys.stderr
    if framework.startswith("megatron"):
        import torch.distributed as dist
        from support import megatron_cpu

        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=mutant.ranks)
        with contextlib.ExitStack() as stack:
            stack.enter_context(megatron_cpu.cuda_answered())
            megatron_cpu.initialize(pp=mutant.ranks)
            pipe.send(judge(framework, mutant, rank))
    else:
        pipe.send(judge(framework, mutant))
    pipe.close()
    sys.stderr.flush()
    os._exit(0)


def run(framework, mutant):
    """The outcomes of the ranks as one: what is wrong on any rank is wrong."""
    fork, results, children = multiprocessing.get_context("fork"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(mutant.ranks):
            receive, send = fork.Pipe(duplex=False)
            child = fork.Process(target=in_child, args=(framework, mutant, rank, f"{folder}/store", send))
            child.start()
            send.close()
            children.append((child, receive))
        for child, receive in children:
            try:
                results.append(receive.recv() if receive.poll(40) else ("crashed", "no answer in 40 s"))
            except EOFError:
                results.append(("crashed", "the process died"))
            child.kill()
            child.join()
    order = ("invalid", "crashed", "differs", "refused", "agrees")
    return min(results, key=lambda result: order.index(result[0]))


@functools.cache
def imported(framework):
    """Import what the mutants of a framework change. Returns why that cannot be."""
    from mutants.routes import FRAMEWORKS
    from mutants.source import locate
    from support import hooked, megatron_tiny, olmo_models, te_python, trace_families  # noqa: F401  before the forks

    if framework == "megatron_te":
        try:
            te_python.install()
        except te_python.Unavailable as reason:
            return str(reason)
    row = FRAMEWORKS[framework]
    for path in (f"{row.norm}.forward", f"{row.block}.forward", *row.touched):
        locate(path)
    return ""


def serve():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    from mutants.table import MUTANTS

    mutants = {mutant.name: mutant for mutant in MUTANTS}
    for line in sys.stdin:
        framework, name = line.split()
        reason = imported(framework)
        found = ("unavailable", reason) if reason else run(framework, mutants[name])
        print(json.dumps(found), file=answers, flush=True)


@functools.cache
def server(transformer_engine):
    """A process for all frameworks of this environment, or one that imports Transformer Engine before Megatron."""
    variables = {"OLMO_LNS_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    if transformer_engine:  # switches off TE's assertion that there is a GPU
        variables |= {"PYTHONOPTIMIZE": "1", "TORCHDYNAMO_DISABLE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "mutants.driver"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | variables,
    )  # fmt: skip
    atexit.register(process.kill)
    return process


def cases(*frameworks):
    """A parameter of a test for each mutant of these frameworks."""
    import pytest
    from mutants.table import MUTANTS

    for framework in frameworks:
        for mutant in (each for each in MUTANTS if framework in each.apply):
            marks = [pytest.mark.slow] if framework == "megatron_te" else []
            yield pytest.param(framework, mutant, id=f"{framework}-{mutant.name}", marks=marks)


def check(framework, mutant):
    """Fail unless the package followed the mutant, or, where that may be, refused it."""
    import pytest

    process = server(framework == "megatron_te")
    print(framework, mutant.name, file=process.stdin, flush=True)
    outcome, detail = json.loads(process.stdout.readline() or '["crashed", "the driver died"]')
    if outcome == "unavailable":
        pytest.skip(detail)
    allowed = ("agrees",) if mutant.harmless or mutant.followed else ("agrees", "refused")
    if outcome not in allowed:
        pytest.fail(f"{outcome}, expected {' or '.join(allowed)}: {detail}", pytrace=False)


if __name__ == "__main__":
    serve()
