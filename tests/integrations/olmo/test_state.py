"""The mark in the trainer's state: an OLMo without the plugin cannot resume what was trained under a scheme."""

from __future__ import annotations

import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import Result, environment, torchrun, write_config
from support.launch import run as launch

from olmo_lns import cli
from olmo_lns.arguments import process_group
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.olmo import mark
from olmo_lns.integrations.olmo import register, state
from olmo_lns.record import Record
from olmo_lns.runs.train import load_config, prepare
from olmo_lns.runs.trainer import run
from olmo_lns.schemes import parse

register()

LNS = Record(parse("lns"), "rms", "plain")
REFUSED = "this checkpoint was saved with lns:exponent=0.5 over rms"


#: OLMo's Trainer with nothing of ours registered, where the plugin is switched off: stock OLMo on a CPU.
STOCK = """
import sys
from olmo.config import TrainConfig
from olmo.util import clean_opt, prepare_cli_environment
from olmo_lns.runs.train import prepare
from olmo_lns.arguments import process_group
prepare_cli_environment()
config = TrainConfig.load(sys.argv[1], [clean_opt(text) for text in sys.argv[2:]])
with process_group() as device:
    prepare(config, device)
    from olmo_lns.runs.trainer import run
    run(config, device)
"""


def config_file(folder: Path, **changes: Any) -> Path:
    values = {"max_duration": 4, "stop_at": None, "save_interval": 2, "no_pre_train_checkpoint": True}
    return write_config(folder, **(values | {"model.layer_norm_type": "rms"} | changes))


def train(folder: Path, *overrides: str) -> None:
    """In this process, with the plugin."""
    config = load_config(config_file(folder), overrides)
    with process_group() as device:
        prepare(config, device)
        run(config, device)


def stock(folder: Path, *overrides: str) -> Result:
    command = [sys.executable, "-c", STOCK, config_file(folder), *overrides]
    return launch(command, cwd=folder, env=environment(OLMO_LNS_DISABLE="1"))


@pytest.fixture(scope="module")
def lns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("lns")
    train(folder, "--model.layer_norm_type=lns", "--max_duration=2")
    return folder / "run" / "step2-unsharded"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [(), pytest.param(("--reset_trainer_state=true",), marks=pytest.mark.exhaustive)], ids=["", "reset"]
)
def test_without_the_plugin_it_is_not_resumed_as_preln(lns: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    """With it and the flag the losses go on: test_train.py."""
    result = stock(tmp_path, f"--load_path={lns}", *more)
    assert result.code != 0 and not result.losses()
    assert REFUSED in result.text and "unset OLMO_LNS_DISABLE" in result.text


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_folded_export_is_resumed_by_stock_olmo_and_an_unfolded_one_is_not(lns: Path, tmp_path: Path) -> None:
    folded, again = tmp_path / "folded-unsharded", tmp_path / "again-unsharded"
    assert cli.main(["export", str(lns), str(folded)]) == 0
    resumed = stock(tmp_path / "stock", f"--load_path={folded}", "--reset_optimizer_state=true").ok()
    assert len(resumed.losses()) == 2, "the trainer's state was not restored"
    assert cli.main(["export", str(folded), str(again), "--unfold", "--drop-optimizer"]) == 0
    load = (f"--load_path={again}", "--reset_optimizer_state=true")
    refused = stock(tmp_path / "refused", *load)
    assert refused.code != 0 and REFUSED in refused.text
    train(tmp_path / "accepted", *load, "--model.layer_norm_type=lns")


@pytest.mark.slow
def test_stock_checkpoints_have_no_mark_and_their_state_is_copied_bit_for_bit(tmp_path: Path) -> None:
    train(tmp_path, "--max_duration=2")
    path = tmp_path / "run" / "step2-unsharded" / "train.pt"
    with zipfile.ZipFile(path) as archive:
        assert not any(b"olmo_lns" in archive.read(name) for name in archive.namelist())
    before = path.read_bytes()
    mark(path, Record())
    assert path.read_bytes() == before


#: What OLMo itself calls for the trainer's state in the restore of its sharded checkpointers.
LOAD = """
import sys
import olmo.train, torch
from olmo.checkpoint import load_state_dict
from olmo_lns.runs.trainer import _STATE_TYPES
torch.serialization.add_safe_globals(_STATE_TYPES)
for rank in range(2):
    try:
        print("loaded", load_state_dict(sys.argv[1], f"train/rank{rank}.pt")["global_step"])
    except Exception as error:
        print(error)
"""


def loaded(folder: Path, **variables: str) -> list[str]:
    """What comes of the state of each of two ranks."""
    done = launch([sys.executable, "-c", LOAD, folder], cwd=folder.parent, env=environment(**variables)).ok()
    return done.text.splitlines()[-2:]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("checkpointer", "name"), [("torch_new", "train/rank{}.pt"), ("torch_legacy", "rank{}.pt")])
def test_every_rank_of_a_sharded_checkpoint(checkpointer: str, name: str, tmp_path: Path) -> None:
    """OLMo's ``local`` cannot save under the suite's torch (NotImplementedError in ``_fsdp_handles``)."""
    config = config_file(tmp_path, max_duration=2, **{"model.layer_norm_type": "lns_rms"})
    command = ["-m", "olmo_lns", "train", config, "--distributed_strategy=fsdp", "--fsdp.precision=null"]
    torchrun(sys.executable, 2, *command, f"--sharded_checkpointer={checkpointer}", cwd=tmp_path).ok()
    folder = tmp_path / "run" / "step2"
    for rank in range(2):
        with zipfile.ZipFile(folder / name.format(rank)) as archive:
            pickled = b"".join(archive.read(each) for each in archive.namelist() if each.endswith("data.pkl"))
        assert b"olmo_lns.integrations.olmo.state\nneeds_olmo_lns" in pickled
    if checkpointer == "torch_legacy":  # one file holds all, read only where a process group is up
        return
    assert all(REFUSED in line for line in loaded(folder, OLMO_LNS_DISABLE="1"))
    assert loaded(folder) == ["loaded 2"] * 2
    assert cli.main(["export", str(folder), str(tmp_path / "folded")]) == 0
    assert loaded(tmp_path / "folded", OLMO_LNS_DISABLE="1") == ["loaded 2"] * 2


def saved(path: Path, record: Record) -> dict[str, Any]:
    """A state as torch saves it, with objects that refer to each other and a tensor."""
    shared = ["a", Path("olmo_lns")]
    values: dict[str, Any] = {"global_step": 3, "first": shared, "again": shared, "rng": torch.arange(3)}
    if record.active:
        values[state.KEY] = state.Mark(str(record))
    torch.save(values, path)
    return values


def test_the_mark_is_taken_out_put_in_and_taken_out_again(tmp_path: Path) -> None:
    path = tmp_path / "train.pt"
    path.write_bytes(b"opaque")
    with pytest.raises(LNSConfigError, match=r"train\.pt is truncated or not a file of torch\.save"):
        mark(path, LNS)
    saved(path, LNS)
    plain = {"global_step": 3, "first": ["a", Path("olmo_lns")]}
    for record in (LNS, Record(), LNS, LNS, Record()):
        mark(path, record)
        found = torch.load(path, weights_only=False)
        assert (state.KEY in found) == record.active
        if record.active:
            assert found[state.KEY].record == str(LNS)
        assert {key: found[key] for key in plain} == plain and found["first"] is found["again"]
        assert torch.equal(found["rng"], torch.arange(3))


def test_a_loaded_mark_is_saved_again(tmp_path: Path) -> None:
    """OLMo's ``unshard.py`` does so."""
    path = tmp_path / "train.pt"
    saved(path, LNS)
    torch.save(torch.load(path, weights_only=False), path)
    assert torch.load(path, weights_only=False)[state.KEY].record == str(LNS)


def test_the_name_in_saved_checkpoints_never_changes(tmp_path: Path) -> None:
    saved(tmp_path / "train.pt", LNS)
    with zipfile.ZipFile(tmp_path / "train.pt") as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    functions = [value for code, value, _ in pickletools.genops(pickled) if code.name == "GLOBAL"]
    assert "olmo_lns.integrations.olmo.state needs_olmo_lns" in functions


def test_where_the_package_is_absent_it_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "train.pt", LNS)
    code = (
        "import sys; sys.modules['olmo_lns'] = None; import torch\n"
        f"torch.load({str(tmp_path / 'train.pt')!r}, weights_only=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and done.stderr.strip().splitlines()[-1].startswith("ModuleNotFoundError")
    assert "olmo_lns" in done.stderr.strip().splitlines()[-1]
