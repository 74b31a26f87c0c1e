"""Plans: closed forms equal OLMo's own model and counter, wrong configs are named, and the costs and commands printed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.studies import REPOSITORY

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli, yaml_files
from olmo_lns.study.describe import Study
from olmo_lns.study.engines import OLMO, megatron

CONFIGS = REPOSITORY / "configs"


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch):
    """Megatron's parser changes its process for good, so another test runs it in a process of its own."""
    monkeypatch.delenv("MEGATRON_LM_SRC", raising=False)


def plan(capsys, *words):
    code = cli.main(["plan", *map(str, words)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model.weight_tying": True},
        {"model.layer_norm_with_affine": False},
        {"model.n_kv_heads": 2},
        {"model.mlp_hidden_size": None, "model.mlp_ratio": 6},
    ],
    ids=str,
)
def test_parameters_and_flops_agree_with_olmo(changed):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.model import OLMo

    from olmo_lns.study.engines.olmo import load

    config = load(REPOSITORY / "configs" / "olmo" / "60M-preln.yaml", changed)
    workload = OLMO.workload(yaml_files.flatten(config))
    model = OLMo(config.model.update_with(init_device="meta"), init_params=False)
    assert workload.parameters == OLMO.count(Path(), config) == model.num_params()
    # OLMo counts 6 N_without_wte + 4 wte: it takes the input embedding for a matrix multiplication in the backward
    # pass. Ours leaves this lookup out, and counts a tied embedding as the head.
    more = (-2 if workload.has_tied_embeddings else 4) * workload.embedding_parameters
    per_token = model.num_fwd_flops + model.num_bck_flops
    assert per_token * workload.tokens == pytest.approx(workload.flops + more * workload.tokens, rel=1e-12)


def test_the_norms_and_gates_of_every_scheme_are_counted():
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.model import OLMo

    from olmo_lns.integrations.olmo import norm_types
    from olmo_lns.schemes import Scheme, names

    for name in names():
        sizes = {"model.n_layers": 2, "model.d_model": 48, "model.n_heads": 4, "model.bias_for_layer_norm": True}
        kind = norm_types.type_name(Scheme.of(name), "default")
        config = OLMO.load(CONFIGS / "study/tiny-base.yaml", {**sizes, "model.layer_norm_type": kind})
        model = OLMo(config.model.update_with(init_device="meta"), init_params=False)
        assert OLMO.count(Path(), config) == sum(parameter.numel() for parameter in model.parameters()), name


def test_a_plan_builds_no_model_with_its_scheme(capsys, caplog):
    """The start-up lines of models that nobody trains would hide the table."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    code, text = plan(capsys, "tiny", "--only", "0.2M")
    assert code == 0 and text.startswith("size ") and not caplog.text


@pytest.mark.slow
def test_every_file_of_the_pack_passes(capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    paths = [path for name in ("olmo", "olmo_core", "megatron") for path in (CONFIGS / name).glob("*.yaml")]
    code, text = plan(capsys, *paths, *(path for path in (CONFIGS / "study").glob("*.yaml") if "base" not in path.stem))
    assert code == 0 and "PROBLEM" not in text
    assert ("Megatron did not check" in text) is not megatron.available()


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("olmo/60M-lns", "type: lns_rms", "type: rms", "layer_norm_type is 'rms', but arm 'lns' needs"),
        ("olmo/60M-preln", "stop_at: ${max_duration}", "stop_at: null", "OLMo would run 38157 steps"),
        ("olmo/60M-preln", "stop_at: ${max_duration}", "stop_at: 9", "stop_at is 9, but max_duration is 38147 steps"),
        (
            "olmo/60M-preln",
            "max_duration: 38147",
            "max_duration: 1500",
            "warm-up has 2000 steps, but the run has only 1500",
        ),
        ("olmo/60M-preln", "batch_size: 128", "batch_size: 129", "8 GPUs, .* cannot share a batch of 129"),
        ("olmo/60M-preln", "n_layers: 8", "n_layer: 8", "OLMo refuses the config .*: .*n_layer"),
        ("megatron/60M-lns", "layernorm-scaling: true", "fp16: false", "layernorm_scaling is False, but arm 'lns'"),
        (
            "megatron/60M-lns",
            "lr-decay-iters: 38147",
            "lr-decay-iters: 100",
            "lr-decay-iters is 100, but train-iters is 38147",
        ),
        (
            "megatron/60M-lns",
            "micro-batch-size: 8",
            "micro-batch-size: 32",
            "128 sequences evenly in micro-batches of 32",
        ),
        ("megatron/60M-lns", "num-layers: 8", "num-layers: eight", "is not a number"),
    ],
)
def test_a_wrong_value_in_a_config_is_named(tmp_path, capsys, name, old, new, message):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    text = (REPOSITORY / "configs" / f"{name}.yaml").read_text()
    assert old in text
    path = tmp_path / f"{Path(name).name}.yaml"
    path.write_text(text.replace(old, new))
    code, out = plan(capsys, path, "--gpus", "8")
    assert code == 1 and any(re.search(message, line) for line in out.splitlines() if "PROBLEM" in line), out


def test_a_duration_in_epochs_has_no_cost_and_the_rest_is_checked(tmp_path, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    text = (REPOSITORY / "configs" / "olmo" / "60M-lns.yaml").read_text()
    text = text.replace("max_duration: 38147", "max_duration: 1ep").replace("stop_at: ${max_duration}", "stop_at: null")
    path = tmp_path / "60M-lns.yaml"
    path.write_text(text)
    code, out = plan(capsys, path)
    assert code == 0 and re.search("60M +1 +85.1M +– +– +– ", out) and "the duration is in epochs" in out
    path.write_text(text.replace("lns_rms", "rms"))
    code, out = plan(capsys, path)
    assert code == 1 and "but arm 'lns' needs" in out
    for tokens, steps in (("5242880T", 10), ("5242881T", 11), ("20", 20)):  # of 128 x 4096
        path.write_text(text.replace("1ep", tokens))
        assert OLMO.workload(OLMO.flat_settings(OLMO.load(path, {}))).steps == steps


def test_a_config_file_is_checked_without_a_number_of_gpus(capsys):
    """Its batch of 4 sequences does not fit the 8 GPUs of the estimate."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    assert plan(capsys, "evidence-cpu-base")[0] == 0
    code, text = plan(capsys, "evidence-cpu-base", "--gpus", "8")
    assert code == 1 and "PROBLEM: evidence-cpu-base.yaml: 8 GPUs" in text and "micro-batch" not in text


def test_every_file_of_a_plan_is_checked_after_one_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "wrong.yaml").write_text("arms: [lnss]\n")
    code, text = plan(capsys, tmp_path / "wrong.yaml", "paper-megatron")
    assert code == 1 and "PROBLEM: " in text and "All 15 runs" in text


def test_what_is_priced_is_launched_with_the_same_gpus_and_nodes(capsys):
    code, text = plan(capsys, "paper-megatron", "--only", "7B-lns", "--gpus", "16", "--gpu", "H100")
    assert code == 0 and re.search(r"7B +1 +6.89B +20B +38,147 +608.0 +16 ", text)
    assert "olmo-lns data check FOLDER --sequence 2048 --rows 9765632" in text
    study = Study.load("paper-megatron")
    layouts = {(None, None): (4, 8), (16, None): (2, 8), (4, None): (1, 4), (16, 4): (4, 4), (None, 2): (2, 8)}
    for (gpus, nodes), expected in layouts.items():
        assert replace(study, gpus=gpus, nodes=nodes).layout(study.runs[-1]) == expected
    with pytest.raises(LNSConfigError, match="3 GPUs do not fill 2 nodes"):
        replace(study, gpus=3, nodes=2).layout(study.runs[-1])
