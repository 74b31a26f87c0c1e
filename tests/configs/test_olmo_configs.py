"""Every file of configs/olmo is as rendered, loads in OLMo, and differs from the others of its size in the arm only."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("olmo", reason="needs ai2-olmo")

from olmo_lns.arms import ARMS
from olmo_lns.study import yaml_files
from olmo_lns.study.engines import OLMO, overrides_for
from olmo_lns.study.engines.olmo import load

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted((REPOSITORY / "configs" / "olmo").glob("*.yaml"))
ARM_NAMES = ("preln", "preln_scaled_init", "lns", "preln_mitchell")
#: size -> (layers, width, heads, SwiGLU inner, parameters, sequence, batch, steps, learning rate).
FAMILY = {
    "60M": (8, 512, 8, 2048, 85_074_432, 4096, 128, 38_147, 6e-4),
    "150M": (12, 768, 12, 3072, 190_532_352, 4096, 128, 38_147, 6e-4),
    "300M": (16, 1024, 16, 4096, 371_491_840, 4096, 128, 38_147, 6e-4),
    "1B": (16, 2048, 16, 8192, 1_279_854_592, 2048, 256, 38_147, 4e-4),
    "7B": (32, 4096, 32, 11008, 6_888_361_984, 2048, 256, 38_147, 3e-4),
}


@pytest.fixture(scope="module")
def loaded():
    return {path.stem: load(path) for path in FILES}


def test_every_size_has_a_file_for_every_arm_as_the_script_renders_it():
    assert {path.stem for path in FILES} == {f"{size}-{arm}" for size in FAMILY for arm in ARM_NAMES}
    command = [sys.executable, "scripts/render_configs.py", "--check"]
    assert subprocess.run(command, cwd=REPOSITORY).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_the_values_of_its_size_and_arm(path, loaded):
    from olmo.train import Trainer

    size, _, arm = path.stem.partition("-")
    layers, width, heads, inner, parameters, sequence, batch, steps, rate = FAMILY[size]
    cfg = loaded[path.stem]
    model, optimizer = cfg.model, cfg.optimizer
    assert (model.n_layers, model.d_model, model.n_heads, model.mlp_hidden_size) == (layers, width, heads, 2 * inner)
    assert (model.max_sequence_length, cfg.global_train_batch_size) == (sequence, batch)
    assert OLMO.count(Path(), cfg) == parameters
    assert not model.weight_tying and not model.include_bias and model.layer_norm_eps == 1e-6
    assert (optimizer.learning_rate, optimizer.betas, optimizer.eps) == (rate, (0.9, 0.95), 1e-8)
    assert (optimizer.weight_decay, cfg.max_grad_norm, cfg.scheduler.alpha_f) == (0.1, 1.0, 0.1)
    assert cfg.scheduler.t_warmup == 2000 and cfg.precision == "amp_bf16" and cfg.wandb is None
    for key, value in overrides_for(ARMS[arm], OLMO).items():
        assert yaml_files.flatten(cfg)[key] == value
    # These are the fewest steps for 20B tokens, and the run stops there; OLMo's default would run ten more.
    found = Trainer.max_steps.fget(SimpleNamespace(cfg=cfg))
    assert found == cfg.stop_at == steps == math.ceil(20e9 / sequence / batch)


def test_folders_come_from_the_environment_and_no_file_trains_on_held_out_text(tmp_path, monkeypatch):
    """Every file has one evaluator, over a folder that the pattern of the training data leaves out."""
    from olmo.config import TrainConfig
    from olmo.exceptions import OLMoConfigurationError

    monkeypatch.delenv("OLMO_DATA_DIR", raising=False)
    with pytest.raises(OLMoConfigurationError, match="OLMO_DATA_DIR"):
        TrainConfig.load(FILES[0])
    (tmp_path / "heldout").mkdir()
    for name in ("a.npy", "heldout/b.npy"):
        (tmp_path / name).touch()
    for name in ("OLMO_DATA_DIR", "OLMO_SAVE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    for path in FILES:
        cfg = TrainConfig.load(path)
        (evaluator,) = cfg.evaluators
        assert (evaluator.label, evaluator.data.paths) == ("heldout", [str(tmp_path / "heldout" / "b.npy")])
        assert cfg.data.paths == [str(tmp_path / "a.npy")] and cfg.save_folder == f"{tmp_path}/{path.stem}"


@pytest.mark.parametrize(
    ("size", "layers", "width", "inner", "heads", "millions", "steps", "warmup", "rate"),
    [
        ("71M", 12, 512, 1368, 8, 70.6, 10_000, 1_000, 1e-3),
        ("130M", 12, 768, 2048, 12, 134.1, 20_000, 2_000, 1e-3),
        ("250M", 24, 768, 2560, 16, 247.4, 40_000, 4_000, 1e-3),
        ("350M", 24, 1024, 2736, 16, 368.0, 60_000, 6_000, 1e-3),
        ("0.5B", 24, 896, 4864, 14, 448.2, 60_000, 6_000, 1e-3),
        ("1B", 24, 2048, 5461, 32, 1339.1, 100_000, 10_000, 5e-4),
        ("7B", 32, 4096, 11008, 32, 6738.4, 150_000, 15_000, 5e-4),
    ],
)
def test_llama_configs_have_the_papers_values(size, layers, width, inner, heads, millions, steps, warmup, rate):
    """The values are those that OLMo loads from each file."""
    path = REPOSITORY / "configs" / "olmo" / "llama-c4" / f"{size}.yaml"
    cfg = load(path)
    model = cfg.model
    assert (model.n_layers, model.d_model, model.mlp_hidden_size, model.n_heads) == (layers, width, 2 * inner, heads)
    assert OLMO.count(Path(), cfg) / 1e6 == pytest.approx(millions, abs=0.06)
    assert (cfg.max_duration, cfg.stop_at, cfg.scheduler.t_warmup, cfg.optimizer.learning_rate) == (
        steps, steps, warmup, rate,
    )  # fmt: skip
    assert (model.emb_init_std, model.init_cutoff_factor, cfg.max_grad_norm, cfg.optimizer.weight_decay) == (
        0.632, None, 1.0 if size == "7B" else None, 0.0,
    )  # fmt: skip
    assert cfg.global_train_batch_size * model.max_sequence_length == 131_072
    assert cfg.scheduler.warmup_min_lr == 0 and cfg.optimizer.betas == (0.9, 0.999) and cfg.optimizer.eps == 1e-8
