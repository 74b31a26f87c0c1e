"""torchtitan's own entry point, unmodified: the flag trains what hooks train, and without the flag nothing changes."""

import re

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")

from support import torchtitan_launch as launches
from support.torchtitan_launch import Launch

LNS = ("--override.imports", "olmo_lns.torchtitan.lns")
SAVE = ("--checkpoint.enable", "--checkpoint.interval", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return launches.folder(tmp_path_factory.mktemp("torchtitan"))


def difference(a, b):
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def compare(folder, name, options=(), *, note="", **settings):
    """Launch stock, installed, hooks and LNS with the same options; compare the losses of their two steps.

    :param note: what torchtitan logs if the options have an effect. :returns: the result under LNS.
    """
    stock, installed, hooks, lns = launches.run(
        folder,
        Launch(f"{name}-stock", options, installed=False, **settings),
        Launch(f"{name}-installed", options, **settings),
        Launch(f"{name}-hooks", options, hooks=True, **settings),
        Launch(f"{name}-lns", (*LNS, *options), **settings),
    )
    for result in (stock, installed, hooks, lns):
        assert len(result.ok().losses) == 2 and note in result.log, result.log[-3000:]
    imported = [result.log.count("olmo_lns was imported: True") for result in (stock, installed, hooks, lns)]
    processes = settings.get("processes", 1)
    assert imported == [0, processes, 0, processes], "the start-up hook imports this package where it is installed"
    print(f"{name}: stock {stock.losses} hooks {hooks.losses} lns {lns.losses}")
    assert installed.losses == stock.losses, "bit for bit"
    assert difference(lns, hooks) < 1e-6
    assert difference(lns, stock) > 1e-5, "ten times the difference that the hooks may have"
    assert "LayerNorm Scaling" not in stock.log + installed.log + hooks.log
    return lns


def test_the_flag_trains_what_hooks_train_and_without_it_nothing_changes(folder):
    """torchtitan's debug model has selective activation checkpointing."""
    lns = compare(folder, "one-process", note="Applied SelectiveAC")
    assert "olmo_lns - INFO - LayerNorm Scaling on: 12 norms (RMSNorm); s = 1 (block 1)" in lns.log


@pytest.mark.slow
def test_a_launch_in_a_new_interpreter_trains_the_same(folder):
    """`python -m torchtitan.train` as a user types it; the other launches are forks of one interpreter."""
    (fork,) = launches.run(folder, Launch("fork", LNS))
    new = launches.run_in_a_new_interpreter(folder, Launch("new", LNS)).ok()
    assert new.losses == fork.ok().losses
    assert "olmo_lns - INFO - LayerNorm Scaling on: 12 norms (RMSNorm)" in new.log


#: Options of one process, and what torchtitan logs.
OTHERS = {
    # --override.imports takes every word up to the next flag.
    "full activation checkpointing": (("--training.steps", "2", "activation_checkpoint:full"), "Applied FullAC"),
    "compile with aot_eager": (
        ("--compile.enable", "--compile.backend", "aot_eager"),
        "Compiling each TransformerBlock with torch.compile",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_one_process_trains_what_hooks_train(folder, name):
    options, note = OTHERS[name]
    compare(folder, name.replace(" ", "-"), options, note=note)


@pytest.mark.slow
def test_inductor_trains_what_hooks_train(folder):
    """Two blocks, and C++ without vector instructions, because Inductor compiles for a minute or more."""
    options = ("--module", "small_llama", "--config", "two_blocks", "--compile.enable")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    stock, hooks, lns = launches.run(
        folder,
        Launch("inductor-stock", options, installed=False, environment=cache),
        Launch("inductor-hooks", options, hooks=True, environment=cache),
        Launch("inductor-lns", (*LNS, *options), environment=cache),
    )
    (installed,) = launches.run(folder, Launch("inductor-installed", options, environment=cache))  # finds it compiled
    print(f"Inductor: stock {stock.ok().losses} hooks {hooks.ok().losses} lns {lns.ok().losses}")
    assert installed.ok().losses == stock.losses, "bit for bit"
    assert "Compiling each TransformerBlock with torch.compile" in lns.log
    assert len(list((folder / "inductor").rglob("*.so"))) > 2, "Inductor's libraries"
    assert len(lns.losses) == 2 and difference(lns, hooks) < 1e-6 and difference(lns, stock) > 1e-5


#: Family -> its debug config, and the error under the flag, if the family is refused.
DECODERS = {
    "qwen3": ("qwen3_debugmodel", None),
    "qwen3, a mixture": ("qwen3_moe_debug", None),
    "deepseek_v3": ("deepseek_v3_debugmodel", None),
    "muse_glimmer": ("muse_glimmer_debugmodel", "its norm post_attention_norm sits on a branch"),
    "gpt_oss": ("gpt_oss_debugmodel_flex", None),
    "kimi_k2_7": ("kimi_k2_5_debugmodel", None),
    "qwen3_5": ("qwen35_debugmodel", "olmo_lns.torchtitan.lns had no effect"),
    "flux": ("flux_debugmodel", "olmo_lns.torchtitan.lns had no effect"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_a_family_trains_a_step_or_is_refused(folder, family):
    config, refusal = DECODERS[family]
    options = ("--module", family.partition(",")[0], "--config", config, "--training.steps", "1")
    stock, lns = launches.run(
        folder, Launch(f"{config}-stock", options, installed=False), Launch(f"{config}-lns", (*LNS, *options))
    )
    if stock.status:
        errors = [line for line in stock.log.splitlines() if re.match(r"\w+(Error|NotFound)\b.*: ", line)]
        pytest.skip(f"stock torchtitan cannot train {family} here: {errors[0]}")
    if refusal:
        assert lns.status and refusal in lns.log, lns.log[-3000:]
        return
    assert "LayerNorm Scaling on:" in lns.ok().log
    assert difference(lns, stock) > 1e-5, "ten times the difference that the hooks may have"


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
    compare(folder, layout.replace(" ", "-"), options, processes=2)


@pytest.mark.slow
def test_two_processes_with_the_default_backend(folder):
    """torchtitan's default backend for DTensors needs a torch that is newer than 2.13."""
    (stock,) = launches.run(folder, Launch("spmd-types", LAYOUTS["FSDP"], processes=2, installed=False))
    if stock.status and "all parameters must be DTensors on the full SPMD mesh" in stock.log:
        pytest.skip(
            "torchtitan's spmd_types fails without this package: When dp_mesh_dims is provided, all parameters …"
        )
    stock.ok()
    compare(folder, "spmd-types", LAYOUTS["FSDP"], processes=2)


@pytest.mark.slow
def test_a_checkpoint_carries_its_scheme(folder):
    for result in launches.run(folder, Launch("saved", (*SAVE, *LNS)), Launch("saved-stock", SAVE)):
        result.ok()
    more = ("--checkpoint.enable", "--training.steps", "3")
    other = ("--override.imports", 'olmo_lns.torchtitan.lns={"exponent": 0.25}')
    same, *refused = launches.run(
        folder,
        Launch("same", (*more, *LNS), folder="saved"),
        Launch("without-the-flag", (*more, "--checkpoint.load_only"), folder="saved"),
        Launch("another-exponent", (*more, *other), folder="saved"),
        Launch("stock-under-the-flag", (*more, *LNS), folder="saved-stock"),
    )
    assert len(same.ok().losses) == 1 and "Training starts at step 3" in same.log
    findings = (
        "its index says lns, but this run has preln",
        "its index says lns, but this run has lns:exponent=0.25",
        "its index says preln, but this run has lns",
    )
    for result, finding in zip(refused, findings, strict=True):
        assert result.status != 0 and finding in result.log, f"{result.name}\n{result.log[-3000:]}"
        assert not result.losses
