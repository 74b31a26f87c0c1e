"""What an export was asked for: a format and an exponent that the checkpoint has, and what stock OLMo can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.exports import export, refused, save_olmo

from olmo_lns.cli import main
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import norm_factor
from olmo_lns.record import Record
from olmo_lns.schemes import LNS, Plan, Scheme

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("kind", "init", "sharded"),
    [
        ("lns_rms", "normal_scaled", False),
        ("lns_default", "normal_depth_scaled", True),
        ("layerscale_rms", "normal_scaled", False),
    ],
)
def test_an_init_fn_of_ours_is_not_stocks(tmp_path: Path, kind: str, init: str, sharded: bool) -> None:
    model = save_olmo(tmp_path / "trained", sharded=sharded, layer_norm_type=kind, init_fn=init)
    assert export(tmp_path / "trained", tmp_path / "stock-unsharded", "--format", "olmo-unsharded") == 0
    assert yaml.safe_load((tmp_path / "stock-unsharded" / "config.yaml").read_text())["model"]["init_fn"] == "normal"
    # In a process of stock OLMo:
    assert main(["verify", str(tmp_path / "trained"), str(tmp_path / "stock-unsharded"), "--length", "16"]) == 0
    if kind.startswith("lns"):  # to train on, it is what it was
        assert export(tmp_path / "stock-unsharded", tmp_path / "again-unsharded", "--unfold") == 0
        assert yaml.safe_load((tmp_path / "again-unsharded" / "config.yaml").read_text())["model"]["init_fn"] == init
        saved, again = Record.read(tmp_path / "trained"), Record.read(tmp_path / "again-unsharded")
        assert saved == again and model.config.init_fn == init


@pytest.mark.parametrize("record", [True, False])
def test_preln_with_an_init_fn_of_ours(tmp_path: Path, capsys: Capture, record: bool) -> None:
    save_olmo(tmp_path / "trained", layer_norm_type="rms", init_fn="normal_scaled")
    if not record:  # OLMo's unshard.py copies config.yaml only
        (tmp_path / "trained" / "lns.json").unlink()
    assert export(tmp_path / "trained", tmp_path / "stock") == 0
    out = capsys.readouterr().out
    assert "nothing to fold" in out and "init_fn normal_scaled, which stock OLMo does not know" in out
    found = Record.read(tmp_path / "stock")
    assert found is not None and (found.active, found.scaled_init) == (False, "scaled")
    assert main(["verify", str(tmp_path / "trained"), str(tmp_path / "stock"), "--length", "16"]) == 0


@pytest.mark.parametrize("asked", ["olmo-core", "megatron"])
@pytest.mark.parametrize("unfold", [False, True])
def test_a_format_that_is_not_the_checkpoints(
    checkpoint: Path, tmp_path: Path, capsys: Capture, asked: str, unfold: bool
) -> None:
    source = checkpoint
    if unfold:
        source = tmp_path / "folded"
        assert export(checkpoint, source) == 0
    words = ("--format", asked, *(["--unfold"] if unfold else []))
    line = refused(capsys, source, tmp_path / "out-unsharded", *words)
    assert f"--format {asked}: {source} is an OLMo checkpoint, which is" in line
    assert ("unfolded into olmo" if unfold else "written as olmo or olmo-unsharded or hf") in line


def test_an_exponent_that_the_checkpoint_contradicts(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "says exponent 0.5, --exponent says 0.25" in refused(
        capsys, checkpoint, tmp_path / "out", "--exponent", "0.25"
    )
    save_olmo(tmp_path / "preln", layer_norm_type="rms")
    line = refused(capsys, tmp_path / "preln", tmp_path / "out", "--exponent", "0.25", "--format", "hf")
    assert "no exponent; --exponent 0.25 is for what a checkpoint does not say" in line


def test_an_exponent_that_the_type_contradicts(tmp_path: Path, capsys: Capture) -> None:
    save_olmo(tmp_path / "quarter", layer_norm_type="lns_rms:exponent=0.25")
    (tmp_path / "quarter" / "lns.json").unlink()
    line = refused(capsys, tmp_path / "quarter", tmp_path / "out", "--exponent", "0.5")
    assert "config.yaml names lns_rms:exponent=0.25, --exponent says 0.5" in line
    assert export(tmp_path / "quarter", tmp_path / "out", "--exponent", "0.25") == 0


def test_two_norms_of_a_block_with_different_factors_are_no_single_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert norm_factor(LNS, 4)(4) == 0.5
    plan = Scheme.plan

    def uneven(self: Scheme, number: int, layers: int, sub_layer: str) -> Plan:
        return plan(self, number if sub_layer == "attn" else 1, layers, sub_layer)

    monkeypatch.setattr(Scheme, "plan", uneven)
    with pytest.raises(LNSConfigError, match="multiplies the two norms of block 4 differently"):
        norm_factor(LNS, 4)(4)


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("kind", ["lns_rms", "rms"])
def test_the_card_tells_multiplied_from_cast(tmp_path: Path, kind: str, dtype: str) -> None:
    model = save_olmo(tmp_path / "trained", layer_norm_type=kind)
    words = ("--format", "hf", "--dtype", dtype, "--tokenizer", "none")
    assert export(tmp_path / "trained", tmp_path / "hf", *words) == 0
    card = (tmp_path / "hf" / "README.md").read_text()
    norms = 2 * (model.config.n_layers - 1) if kind == "lns_rms" else 0  # the first block's factor is 1
    others = len(model.state_dict()) - norms
    assert (f"{norms} tensors were multiplied by their block's factor" in card) is bool(norms)
    assert ("tensors were written in another dtype" in card) is (dtype == "bf16")
    assert dtype == "keep" or f"{others} tensors were written in another dtype" in card
    assert ("No weight was changed" in card) is (kind == "rms" and dtype == "keep")


@pytest.mark.parametrize("form", [("--format", "olmo"), ()], ids=" ".join)
def test_what_only_hugging_face_takes(checkpoint: Path, form: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    line = refused(capsys, checkpoint, tmp_path / "out", *form, "--tokenizer", "t.json")
    assert "--tokenizer is of --format hf; --format olmo has no place for it" in line
