"""An error of one process of a launch is raised in all of them, with its class, and none waits for the others."""

import multiprocessing
import types

import pytest
import torch
import torch.distributed as dist
from support import forked, olmo_models
from support.other_models import own

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, MeasurementError

EXAMPLE = torch.arange(8)[None]


def _fail(model):
    raise MemoryError("no memory is left")


#: Case -> scheme and example by rank, the class of the error by rank, and its text.
CASES = {
    "one rank has another scheme": (("lns", "lsn"), (EXAMPLE, EXAMPLE), (LNSConfigError, LNSConfigError), "rank 1: "),
    "the first rank cannot run": (("lns", "lns"), (_fail, EXAMPLE), (LNSConfigError, LNSConfigError), "no memory is"),
    "all are trained": (("lns", "lns"), (EXAMPLE, EXAMPLE), (CheckpointMismatchError,) * 2, "rank 0, 1: "),
}


def _run(function, *arguments):
    """Run ``function(rank, folder, ..., results)`` in two processes, and return what they put into ``results``."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=function, args=(rank, *arguments, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted((results.get(timeout=60) for _ in ranks), key=lambda result: result[0])
    for process in ranks:
        process.join(timeout=60)
    return found


def _launch(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)


def _apply(rank, folder, case, results):
    _launch(rank, folder)
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
    found = _run(_apply, tmp_path, case)
    assert tuple(error for _, error, _ in found) == CASES[case][2]
    assert all(CASES[case][3] in text for _, _, text in found), found


class Fused(torch.nn.Module):
    """A model in which a fused kernel outside of the blocks replaces the norms unless they have hooks."""

    def __init__(self):
        super().__init__()
        self.model = own()[0]

    def forward(self, ids):
        norms = [block.n1 for block in self.model.layers.values()]
        output = self.model(ids)
        return output if norms[0]._forward_hooks or not hasattr(norms[0], "lns_scale") else 2.0 * output


def _apply_that_fails_on_one_rank(rank, folder, case, results):
    _launch(rank, folder)
    if case == "llama":
        from support import transformers_models

        trained = transformers_models.stock("llama", num_hidden_layers=2)
        model = type(trained)(trained.config)  # with fresh weights
        norms, example = [layer.input_layernorm for layer in model.model.layers], None
    elif case == "olmo":
        model = olmo_models.build(perturb=False, layer_norm_type="rms")
        norms, example = [block.attn_norm for block in model.transformer.blocks], None
    elif case == "first rank":
        model = Fused()
        norms, example = [block.n1 for block in model.model.layers.values()], EXAMPLE
    else:
        model = own()[0].eval()
        norms, example = [block.n1 for block in model.layers.values()], EXAMPLE
    if rank == 1 and case != "first rank":
        with torch.no_grad():
            norms[0].weight[0] += 0.5  # looks trained
    state = {name: value.clone() for name, value in model.state_dict().items()}
    classes = {name: type(module) for name, module in model.named_modules()}
    config = str(getattr(model, "config", ""))
    try:
        olmo_lns.apply(model, example=example)
    except Exception as error:
        same = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        same &= classes == {name: type(module) for name, module in model.named_modules()}
        same &= config == str(getattr(model, "config", "")) and not any(sites.in_model(model))
        results.put((rank, type(error), same))
    else:
        results.put((rank, None, False))


@pytest.mark.parametrize("case", ["any", "first rank", "llama", "olmo"])
def test_an_error_of_one_rank_leaves_the_model_of_every_rank_unchanged(case, tmp_path):
    if case == "olmo":
        pytest.importorskip("olmo")
    if case == "llama":
        pytest.importorskip("transformers")
    error = MeasurementError if case == "first rank" else CheckpointMismatchError
    assert _run(_apply_that_fails_on_one_rank, tmp_path, case) == [(0, error, True), (1, error, True)]


def _restore(rank, folder, results):
    from olmo_lns.integrations.olmo.checkpoint import wrap_restore

    _launch(rank, folder)
    trainer = types.SimpleNamespace(model=olmo_models.build(perturb=False, layer_norm_type="lns_rms"))
    restore = wrap_restore(lambda self, load_path: "loaded")
    try:
        results.put((rank, restore(trainer, folder / ("saved" if rank == 0 else "not mounted"))))
    except Exception as error:
        results.put((rank, repr(error)))


def test_a_config_that_one_rank_cannot_read_does_not_stop_that_rank_alone(tmp_path):
    pytest.importorskip("olmo")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.yaml").write_text("model: {layer_norm_type: lns_rms}")
    assert _run(_restore, tmp_path) == [(0, "loaded"), (1, "loaded")]


def test_the_public_functions_need_no_fcntl_which_windows_lacks():
    code = "import sys\nsys.modules['fcntl'] = None\nimport olmo_lns\n"
    code += "for name in olmo_lns.__all__: getattr(olmo_lns, name)\nprint('olmo_lns.dispatch' in sys.modules)"
    done = forked.run(code)
    assert done.stdout == "True\n", done.stderr
