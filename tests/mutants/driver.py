"""Run every mutant of one framework, each in a fork of a process that has imported the framework and not the package.

``python -m mutants.driver olmo`` prints one line of JSON: mutant -> (outcome, detail). The outcomes: ``agrees`` with hooks
on the mutated upstream, ``refused`` by an error of the package, ``differs``, ``crashed`` by any other error, ``invalid``
where the mutated upstream does not run or is not another.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings

import torch

TOLERANCE = 1e-5


def perturb(model):
    """Gains that differ from each other and from one, and matrices far from the near-identity of the start."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
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


def fold(row, model):
    """The factor in the gains."""
    from support.hooked import known

    for number, block in enumerate(known(model)[0](model) if known(model) else row.blocks(model), start=1):
        for name in row.norms:
            block.get_submodule(name).weight.data.mul_(number**-0.5)


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
        fold(row, expected) if mutant.folded else hook()
        if mutant.calls is not None:
            mutant.calls.clear()
        result = output(row, model)
        if mutant.calls is not None and not mutant.calls:
            return "differs", "the wrapper around the norms' forward did not run"
        error = difference(result, output(row, expected))
        return ("agrees", f"{error:.1e}") if error < TOLERANCE else ("differs", f"off by {error:.1e}")
    except LNSError as error:
        return "refused", str(error)
    except Exception as error:
        if any(isinstance(e, LNSError) for e in (error.__cause__, error.__context__)):
            return "refused", str(error)
        return "crashed", traceback.format_exc()


def in_child(framework, mutant, rank, file, pipe):
    sys.stdout = sys.stderr
    if framework == "megatron":
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


def main(framework, only):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mutants.routes import FRAMEWORKS
    from mutants.table import MUTANTS
    from support import hooked, megatron_tiny, trace_families  # noqa: F401  before the forks

    row = FRAMEWORKS[framework]
    from mutants.source import locate

    with contextlib.suppress(ImportError):
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    for path in (f"{row.norm}.forward", f"{row.block}.forward", *row.touched):
        locate(path)
    for mutant in MUTANTS:
        if framework in mutant.apply and (not only or mutant.name in only):
            print(json.dumps([mutant.name, *run(framework, mutant)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
