"""torchtitan's own entry point, unmodified: the flag trains what hooks train, and without the flag nothing changes."""

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")

from support import torchtitan_launch as launches
from support.torchtitan_launch import Launch

LNS = ("--override.imports", "olmo_lns.torchtitan.lns")
PLAIN = ("--override.imports", "olmo_lns.torchtitan.plain_initialization")
SAVE = ("--checkpoint.enable", "--checkpoint.interval", "1", "--training.steps", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return launches.folder(tmp_path_factory.mktemp("torchtitan"))


def test_the_flag_trains_what_hooks_train_and_without_it_nothing_changes(folder):
    started = {
        "stock": Launch(folder, "stock", installed=False),
        "installed": Launch(folder, "installed"),
        "hooks": Launch(folder, "hooks", installed=False, hooks=True),
        "lns": Launch(folder, "lns", *LNS),
    }
    found = {name: launch.result() for name, launch in started.items()}
    for name, result in found.items():
        assert result.status == 0 and len(result.losses) == 2, f"{name}\n{result.log[-3000:]}"
    assert {name: "olmo_lns was imported: True" in result.log for name, result in found.items()} == {
        "stock": False,
        "installed": True,  # by the start-up hook
        "hooks": False,
        "lns": True,
    }
    assert found["installed"].losses == found["stock"].losses, "bit for bit"
    assert found["lns"].losses == pytest.approx(found["hooks"].losses, abs=1e-6)
    assert max(abs(a - b) for a, b in zip(found["lns"].losses, found["stock"].losses, strict=True)) > 1e-3
    assert "olmo_lns - INFO - LayerNorm Scaling on: 12 norms (RMSNorm); s = 1 (block 1)" in found["lns"].log
    assert "LayerNorm Scaling" not in found["stock"].log + found["installed"].log + found["hooks"].log


#: Options of one process, and what torchtitan logs. Its debug model has selective activation checkpointing, no compile.
OTHERS = {
    "full activation checkpointing": (("--training.steps", "2", "activation_checkpoint:full"), "Applied FullAC"),
    # Without Inductor, which compiles C++ for minutes.
    "compile": (
        ("--compile.enable", "--compile.backend", "aot_eager"),
        "Compiling each TransformerBlock with torch.compile",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_one_process_trains_what_hooks_train(folder, name):
    options, note = OTHERS[name]
    short = name.replace(" ", "-")
    lns = Launch(folder, f"{short}-lns", *LNS, *options)
    hooks = Launch(folder, f"{short}-hooks", *options, installed=False, hooks=True)
    scaled, expected = lns.result(), hooks.result()
    assert scaled.status == expected.status == 0, scaled.log[-3000:] + expected.log[-3000:]
    assert note in scaled.log and note in expected.log
    assert scaled.losses == pytest.approx(expected.losses, abs=1e-6)


#: Options of a layout on two processes.
LAYOUTS = {
    "FSDP": ("--parallelism.data_parallel_shard_degree", "2"),
    "tensor and sequence parallelism": ("--parallelism.tensor_parallel_degree", "2"),
    # Two stages a process, so that the blocks of a process are not consecutive.
    "pipeline": (
        *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
        "--training.disable_cuda_graphs",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_train_what_hooks_train(folder, layout):
    options = ("--parallelism.spmd_backend", "partial_dtensor", *LAYOUTS[layout])
    name = layout.replace(" ", "-")
    lns = Launch(folder, f"{name}-lns", *options, *LNS, processes=2)
    hooks = Launch(folder, f"{name}-hooks", *options, processes=2, installed=False, hooks=True)
    scaled, expected = lns.result(), hooks.result()
    assert scaled.status == expected.status == 0, scaled.log[-3000:] + expected.log[-3000:]
    assert scaled.losses == pytest.approx(expected.losses, abs=1e-6)


@pytest.mark.slow
def test_a_checkpoint_carries_its_scheme(folder):
    started = {
        "saved": Launch(folder, "saved", *LNS, *SAVE),
        "stock": Launch(folder, "saved-stock", *SAVE),
    }
    for name, launch in started.items():
        assert (result := launch.result()).status == 0, f"{name}\n{result.log[-3000:]}"
    more = ("--checkpoint.enable", "--training.steps", "3")
    resumed = {
        "same": Launch(folder, "saved", *LNS, *more),
        "without the flag": Launch(folder, "saved", *more, "--checkpoint.load_only"),
        "another exponent": Launch(
            folder, "saved", "--override.imports", 'olmo_lns.torchtitan.lns={"exponent": 0.25}', *more
        ),
        "stock under the flag": Launch(folder, "saved-stock", *LNS, *more),
    }
    found = {name: launch.result() for name, launch in resumed.items()}
    assert found["same"].status == 0 and len(found["same"].losses) == 3, found["same"].log[-3000:]
    for name, finding in {
        "without the flag": "its index says lns, but this run has preln",
        "another exponent": "its index says lns, but this run has lns:exponent=0.25",
        "stock under the flag": "its index says preln, but this run has lns",
    }.items():
        assert found[name].status != 0 and finding in found[name].log, f"{name}\n{found[name].log[-3000:]}"


@pytest.mark.slow
def test_the_flag_on_a_model_with_norms_after_its_branches_is_an_error(folder):
    override = ("--override.imports", "olmo_lns.torchtitan.lns")
    result = Launch(
        folder, "muse", "--module", "muse_glimmer", "--config", "muse_glimmer_debugmodel", *override
    ).result()
    assert result.status != 0 and "sits on a branch" in result.log, result.log[-3000:]
