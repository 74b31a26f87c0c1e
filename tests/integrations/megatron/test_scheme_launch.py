"""``--norm-scheme`` in the unmodified pretrain_gpt.py of the checkout named by MEGATRON_LM_SRC."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from integrations.megatron.test_launch import parsed
from support import megatron_launch

from olmo_lns.schemes import names, parse

#: What each start-up line says beside the scheme's name, in a model of four blocks.
BUILT = {
    "lnsafterbranch": "8 norms (RMSNorm), 8 in this process (blocks 1-4); branch_scale = 1 (block 1) to 0.5 (block 4)",
    "sandwich_depth:exponent=0.25": "16 norms (RMSNorm), 16 in this process (blocks 1-4); branch_scale = 1 (block 1)",
    "layerscale": "8 norms (RMSNorm), 8 in this process (blocks 1-4); learned gate from 0.1 to 0.1",
    "skipinit": "8 norms (RMSNorm), 8 in this process (blocks 1-4); learned gate from 0.5 to 0.5",
}
POSSIBLE = ("preln", "lns", "sandwich", "lnsafterattn", "lnsafterff", *(name.split(":")[0] for name in BUILT))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if name not in POSSIBLE])
def test_the_parser_refuses_by_name(name: str) -> None:
    error = parsed("--norm-scheme", name)["error"]
    assert f"{name} ({parse(name).definition.title}) is not available in Megatron: it" in error


@pytest.mark.slow
def test_two_schemes_are_refused() -> None:
    error = parsed("--norm-scheme", "sandwich", "--layernorm-scaling")["error"]
    assert "--layernorm-scaling is short for --norm-scheme lns, but --norm-scheme sandwich was given too" in error
    assert "unknown scheme 'sandwhich'" in parsed("--norm-scheme", "sandwhich")["error"]
    found = parsed("--norm-scheme", "lns", "--layernorm-scaling")
    assert found["layernorm_scaling"] and found["plain"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", BUILT)
def test_trains_saves_resumes_and_refuses(scheme: str, tmp_path: Path) -> None:
    tree, flag = megatron_launch.checkout(), ("--norm-scheme", scheme)
    megatron_launch.build_helpers(tree)
    folder = str(tmp_path / "run")
    first = megatron_launch.pretrain(tree, *flag, "--save", folder, "--save-interval", "3", "--exit-interval", "3")
    title = parse(scheme).definition.title
    assert f"olmo-lns: {title} on: {BUILT[scheme]}" in first.stdout, first.stderr[-3000:]
    assert "scaled initialization off" in first.stdout
    proj, fc2, qkv = (
        float(re.search(rf"probe: std {kind} ([0-9.]+)", first.stdout)[1])  # type: ignore[index]
        for kind in ("linear_proj", "linear_fc2", "linear_qkv")
    )
    assert proj == pytest.approx(qkv, rel=0.05) and fc2 == pytest.approx(qkv, rel=0.05)
    given = megatron_launch.pretrain(tree, "--load", folder, *flag)
    restored = megatron_launch.pretrain(tree, "--load", folder, "--use-checkpoint-args")
    assert len(megatron_launch.losses(given)) == 3, given.stderr[-3000:]
    assert megatron_launch.losses(restored) == megatron_launch.losses(given), restored.stderr[-3000:]
    assert f"from the checkpoint's arguments: --norm-scheme {scheme}" in restored.stdout
    for flags, words in (
        (["--finetune"], f"was saved with {scheme}.*but this run has Pre-LN"),
        (["--layernorm-scaling"], f"was saved with {scheme}.*but this run has lns:exponent=0.5"),
    ):
        refused = megatron_launch.pretrain(tree, "--load", folder, *flags)
        assert refused.returncode != 0
        assert re.search(words, refused.stderr + refused.stdout), refused.stderr[-3000:]


@pytest.mark.slow
def test_a_folded_checkpoint_runs_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, flag = megatron_launch.checkout(), ("--norm-scheme", "lnsafterbranch")
    megatron_launch.build_helpers(tree)
    run, folded = tmp_path / "run", tmp_path / "folded"
    done = megatron_launch.pretrain(tree, *flag, "--save", str(run), "--save-interval", "3", "--exit-interval", "3")
    assert (run / "latest_checkpointed_iteration.txt").is_file(), done.stderr[-3000:]
    export = [sys.executable, "-m", "olmo_lns", "export", str(run), str(folded), "--format", "megatron"]
    subprocess.run(export, check=True, capture_output=True)
    expected = megatron_launch.losses(megatron_launch.pretrain(tree, "--load", str(run), "--finetune", *flag))
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    stock = megatron_launch.pretrain(tree, "--load", str(folded), "--finetune")
    assert megatron_launch.losses(stock)[0] == pytest.approx(expected[0], rel=1e-6), stock.stderr[-3000:]
