"""Configs of Megatron become flags, and a real Megatron parses every committed file."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from support.studies import REPOSITORY

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.engines.megatron import expand, main, read, to_flags

FILES = sorted((REPOSITORY / "configs" / "megatron").rglob("*.yaml"))
PARAMETERS = {"60M": 85_074_432, "150M": 190_532_352, "300M": 371_491_840, "1B": 1_279_854_592, "7B": 6_888_361_984}


def config(tmp_path, text):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return path


def test_each_kind_of_value_becomes_its_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERE", "0.3 /a 0.7 '/b c'")
    monkeypatch.delenv("NOT_SET", raising=False)
    text = "num-layers: 2\nbf16: true\nfp16: false\nload: null\nlr: 6.0e-4\ntags: [a, b]\ndata-path: ${oc.env:WHERE}\n"
    text += "save: ${oc.env:NOT_SET,/runs}/x\n"
    assert to_flags(read(config(tmp_path, text))) == [
        *("--num-layers", "2", "--bf16", "--lr", "0.0006", "--tags", "a", "b"),
        *("--data-path", "0.3", "/a", "0.7", "/b c", "--save", "/runs/x"),
    ]
    with pytest.raises(
        LNSConfigError, match="--save reads the environment variable NOT_SET, which is not set. Export NOT_SET"
    ):
        to_flags({"save": "${oc.env:NOT_SET}"})


def test_explicit_flags_win_wherever_they_stand(tmp_path):
    path = config(tmp_path, "num-layers: 2\nmicro-batch-size: 8\nbf16: true\n")
    for argv in (
        ["--micro-batch-size", "4", "--lns-config", str(path), "--log-interval=5"],
        [f"--lns-config={path}", "--micro-batch-size=4", "--log-interval=5"],
    ):
        flags = expand(argv)
        assert flags[:3] == ["--num-layers", "2", "--bf16"] and "8" not in flags
        assert flags[3:] == [word for word in argv if "lns-config" not in word and word != str(path)]
    assert expand(["--num-layers", "3"]) == ["--num-layers", "3"]
    with pytest.raises(LNSConfigError, match="--lns-config was passed 2 times"):
        expand(["--lns-config", str(path), f"--lns-config={path}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layers: 2\n", "the key 'num_layers' is not a flag of Megatron"),
        ("model: {num-layers: 2}\n", "the key 'model' has nested values"),
        ("a: [\n", "cannot be read as YAML"),
        ("lr: 1\nlr: 2\n", "appears twice"),
    ],
)
def test_a_malformed_config_is_refused(tmp_path, text, message):
    with pytest.raises(LNSConfigError, match=message):
        read(config(tmp_path, text))


def test_the_command_prints_the_flags_of_a_config_with_placeholders_where_a_variable_is_not_set(capsys, monkeypatch):
    monkeypatch.delenv("MEGATRON_DATA", raising=False)
    monkeypatch.setenv("MEGATRON_SAVE_DIR", "/runs")
    path = REPOSITORY / "configs" / "megatron" / "7B-lns.yaml"
    assert main([str(path), "--micro-batch-size", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("--layernorm-scaling --num-layers 32 ") and out.count("--micro-batch-size") == 1
    assert "--data-path /MEGATRON_DATA-is-not-set --split 999,1,0" in out and "--save /runs/7B-lns" in out
    assert "MEGATRON_DATA is not set. Export it" in err and "SAVE_DIR" not in err
    assert main([str(path), "--one-per-line"]) == 0
    assert "--hidden-size 4096\n" in capsys.readouterr().out


PROGRAM = REPOSITORY / "tests" / "study" / "programs" / "megatron_parse.py"


def megatron(*words, launcher=False):
    """Run the program with a real Megatron-LM, as on a login node without a GPU, and return what it prints."""
    if not os.environ.get("MEGATRON_LM_SRC"):
        pytest.skip("set MEGATRON_LM_SRC to a Megatron-LM checkout")
    env = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
    env |= {"MEGATRON_DATA": "/data/x_text_document", "MEGATRON_SAVE_DIR": "/runs", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *(["-m", "olmo_lns"] if launcher else []), PROGRAM, *words]
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("size", "tensor", "connections"), [("60M", 1, None), ("7B", 2, "1")])
def test_megatron_starts_with_the_parallelism_and_environment_of_its_config(size, tensor, connections):
    """The command in the header of the file starts it."""
    text = megatron("--lns-config", REPOSITORY / "configs" / "megatron" / f"{size}-lns.yaml", launcher=True)
    found = json.loads(text.splitlines()[-1])
    assert (found["connections"], found["tensor_model_parallel_size"]) == (connections, tensor)
    assert found["sequence_parallel"] is (tensor > 1) and found["eval_iters"] == 4


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["--tensor-model-parallel-size=2"], None, "1"),
        (["--context-parallel-size", "2"], "8", "8"),
        (["--tensor-model-parallel-size", "2", "--use-torch-fsdp2"], None, None),
    ],
)
def test_the_launcher_sets_one_cuda_connection_only_where_megatron_requires_it(words, given, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))")
    env = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": given} if given else {}
    command = [sys.executable, "-m", "olmo_lns", str(script), *words]
    assert subprocess.run(command, env=env, capture_output=True, text=True).stdout.strip() == str(expected)


def test_a_plan_parses_the_files_with_megatron():
    text = megatron("plan", *FILES[-3:])
    assert text.count("\n7B ") == 3 and "PROBLEM" not in text and "did not check" not in text


@pytest.fixture(scope="module")
def parsed():
    """Send all files through the parser, the validation, the tokenizer and the model of a real Megatron-LM."""
    return json.loads(megatron(*FILES).splitlines()[-1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_megatron_trains_the_model_of_the_olmo_file(path, parsed):
    """Megatron's values equal those of the OLMo file of the same name, which is read as plain YAML."""
    args = parsed[path.name]
    olmo = yaml.safe_load((REPOSITORY / "configs" / "olmo" / path.name).read_text())
    model, optimizer, schedule = olmo["model"], olmo["optimizer"], olmo["scheduler"]
    assert (args["num_layers"], args["hidden_size"]) == (model["n_layers"], model["d_model"])
    assert (args["num_attention_heads"], args["seq_length"]) == (model["n_heads"], model["max_sequence_length"])
    assert 2 * args["ffn_hidden_size"] == model["mlp_hidden_size"]
    assert args["swiglu"] and args["bf16"] and args["normalization"] == "RMSNorm" and not args["add_bias_linear"]
    assert args["untie_embeddings_and_output_weights"] == (not model["weight_tying"])
    assert args["position_embedding_type"] == "rope" and args["attention_dropout"] == args["hidden_dropout"] == 0
    epsilon = args.get("norm_epsilon") or args["layernorm_epsilon"]
    assert (epsilon, args["init_method_std"]) == (float(model["layer_norm_eps"]), model["init_std"])
    assert args["train_iters"] == args["lr_decay_iters"] == olmo["max_duration"]
    assert args["global_batch_size"] == olmo["global_train_batch_size"]
    assert args["lr"] == float(optimizer["learning_rate"]) and args["lr_warmup_iters"] == schedule["t_warmup"]
    assert args["min_lr"] == pytest.approx(float(optimizer["learning_rate"]) * schedule["alpha_f"])
    assert [args["adam_beta1"], args["adam_beta2"]] == optimizer["betas"]
    assert args["adam_eps"] == float(optimizer["eps"]) and args["clip_grad"] == olmo["max_grad_norm"]
    assert args["weight_decay"] == args["start_weight_decay"] == args["end_weight_decay"] == optimizer["weight_decay"]
    assert args["padded"] == [model["embedding_size"]]
    size, _, arm = path.stem.partition("-")
    assert (args["layernorm_scaling"], args["no_scaled_init"]) == (arm == "lns", arm == "preln")
    assert args["parameters"] == PARAMETERS[size]
