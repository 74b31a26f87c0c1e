"""An error of one process of a launch is raised in all of them, with its class, and none waits for the others."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from support.other_models import own

import olmo_lns
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError

EXAMPLE = torch.arange(8)[None]


def _fail(model):
    raise MemoryError("no memory is left")


#: Case -> scheme and example by rank, the class of the error by rank, and its text.
CASES = {
    "one rank has another scheme": (("lns", "lsn"), (EXAMPLE, EXAMPLE), (LNSConfigError, LNSConfigError), "rank 1: "),
    "the first rank cannot run": (("lns", "lns"), (_fail, EXAMPLE), (LNSConfigError, LNSConfigError), "no memory is"),
    "all are trained": (("lns", "lns"), (EXAMPLE, EXAMPLE), (CheckpointMismatchError,) * 2, "rank 0, 1: "),
}


def _apply(rank, folder, case, results):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model = own()[0].eval()
    if case == "all are trained":
        with torch.no_grad():
            next(iter(model.layers.values())).n1.weight[0] += 0.5
    schemes, examples, _, _ = CASES[case]
    try:
        olmo_lns.apply(model, schemes[rank], example=examples[rank])
    except Exception as error:
        results.put((rank, type(error), str(error)))


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_one_rank_is_raised_on_every_rank(case, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_apply, args=(rank, tmp_path, case, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted((results.get(timeout=60) for _ in ranks), key=lambda result: result[0])
    for process in ranks:
        process.join(timeout=60)
    assert tuple(error for _, error, _ in found) == CASES[case][2]
    assert all(CASES[case][3] in text for _, _, text in found), found
