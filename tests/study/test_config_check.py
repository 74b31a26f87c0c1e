"""`olmo-lns config check` passes the shipped files and names each wrong one; `config copy` copies from the pack."""

import re
from pathlib import Path

import pytest

pytest.importorskip("olmo", reason="needs ai2-olmo")

from olmo_lns.cli import main
from olmo_lns.study import files
from olmo_lns.study.engines import megatron
from olmo_lns.study.plan import check as config_check

REPOSITORY = Path(__file__).resolve().parents[2]


def run(capsys, *words):
    code = config_check.main(["check", *map(str, words)])
    return code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch):
    """Megatron's parser changes its process for good, so another test runs it in a process of its own."""
    monkeypatch.delenv("MEGATRON_LM_SRC", raising=False)


@pytest.mark.slow
def test_every_shipped_config_passes(capsys):
    code, text = run(capsys, REPOSITORY / "configs")
    shipped = len(list((REPOSITORY / "configs").rglob("*.yaml")))
    assert code == 0 and f"{shipped} files, 0 with problems" in text
    (row,) = [line for line in text.splitlines() if "olmo/7B-lns.yaml" in line]
    assert {"6,888,361,984", "20,000,014,336", "38,147", "5.2%", "ok"} <= set(row.split())
    folders = [REPOSITORY / "configs" / name for name in ("olmo", "megatron")]
    code, text = run(capsys, *(path for folder in folders for path in folder.glob("*.yaml")), "--budget", "20e9")
    assert code == 0 and ("not parsed by Megatron" in text) is not megatron.available()


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("olmo/60M-lns", "init_fn: normal", "init_fn: mitchell", "LNS with the scaled init.* 'mitchell'"),
        ("olmo/60M-lns", "type: lns_rms", "type: rms", "layer_norm_type='rms', but arm 'lns' is"),
        ("olmo/60M-preln", "stop_at: ${max_duration}", "stop_at: null", "OLMo would run 38157 steps"),
        ("olmo/60M-preln", "stop_at: ${max_duration}", "stop_at: 9", "stop_at 9 is not max_duration 38147"),
        ("olmo/60M-preln", "max_duration: 38147", "max_duration: 1500", "warm-up of 2000 steps"),
        ("olmo/60M-preln", "max_duration: 38147", "max_duration: 38146", "expected 38147, the fewest"),
        ("olmo/60M-preln", "batch_size: 128", "batch_size: 129", "8 GPUs do not divide the batch of 129"),
        ("olmo/60M-preln", "init_device: cuda", "init_device: meta", "ddp needs model.init_device cuda"),
        ("olmo/60M-preln", "n_layers: 8", "n_layer: 8", "OLMo refuses it: .*n_layer"),
        ("olmo/60M-preln", "\nmodel:", "\nmodle:", "of no known kind: expected .*OLMo's config .model:., "),
        ("megatron/60M-lns", "layernorm-scaling: true", "bf16: true", "layernorm_scaling=False, but arm 'lns'"),
        ("megatron/60M-lns", "lr-decay-iters: 38147", "lr-decay-iters: 100", "lr-decay-iters 100 is not train-iters"),
        ("megatron/60M-lns", "micro-batch-size: 8", "micro-batch-size: 32", "8 GPUs × micro-batch 32 do not divide"),
    ],
)
def test_a_wrong_value_in_a_config_is_named(tmp_path, capsys, name, old, new, message):
    path = REPOSITORY / "configs" / f"{name}.yaml"
    text = path.read_text()
    assert old in text
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / path.name).write_text(text.replace(old, new))
    code, out = run(capsys, tmp_path, "--budget", "20e9", "--gpus", "8")
    assert code == 1 and any(re.search(message, line) for line in out.splitlines() if "PROBLEM" in line), out


def test_a_config_that_needs_more_memory_than_the_gpu_has_is_refused(tmp_path, capsys):
    code, text = run(capsys, REPOSITORY / "configs" / "olmo" / "7B-lns.yaml", "--gpus", "1", "--gpu", "A100")
    assert code == 1 and "is more than A100 has" in text
    file = REPOSITORY / "configs" / "megatron" / "7B-lns.yaml"
    code, text = run(capsys, file)
    assert code == 0 and "45 GB distributed_optimizer" in text and "more than" not in text
    (tmp_path / "7B-lns.yaml").write_text(file.read_text().replace("parallel-size: 2", "parallel-size: 1"))
    code, text = run(capsys, tmp_path / "7B-lns.yaml")
    assert (
        code == 1 and "parallel-size 1, as the file has it (see its header for this GPU), is more than H100 has" in text
    )
    assert run(capsys, tmp_path / "7B-lns.yaml", "--gpu", "H200")[0] == 0


def test_config_copy_copies_a_file_or_a_folder_and_overwrites_nothing(tmp_path, capsys):
    assert main(["config", "copy", "olmo/60M-lns", "-o", str(tmp_path)]) == 0
    source = files.pack_folder() / "olmo" / "60M-lns.yaml"
    assert (tmp_path / "60M-lns.yaml").read_bytes() == source.read_bytes()
    assert main(["config", "copy", "study", "-o", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "tiny.yaml").is_file()
    assert main(["config", "copy", "olmo/60M-lns", "-o", str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/bin/true", "../tests", "olmo/60M-lsn.yaml"])
def test_config_copy_refuses_what_is_not_in_the_pack(name, tmp_path, capsys):
    assert main(["config", "copy", name, "-o", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert f"the pack has no {name!r}" in err and not (tmp_path / "out").exists()
    assert "lsn" not in name or "did you mean 'olmo/60M-lns.yaml'" in err


def test_a_copied_description_finds_the_configs_of_the_pack(tmp_path, monkeypatch):
    """A config beside the description comes first."""
    from olmo_lns.study.plan.spec import Study

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("llama-c4", "tiny"):
        assert main(["config", "copy", f"study/{name}"]) == 0
    (tmp_path / "olmo" / "llama-c4").mkdir(parents=True)
    assert main(["config", "copy", "olmo/llama-c4/71M", "-o", "../olmo/llama-c4"]) == 0
    found = {run.size: run.config.resolve() for run in Study.load("llama-c4.yaml").runs}
    assert found["71M"] == tmp_path / "olmo" / "llama-c4" / "71M.yaml"
    assert found["130M"] == files.pack_folder() / "olmo" / "llama-c4" / "130M.yaml"
    assert Study.load("tiny.yaml").runs[0].config == files.pack_folder() / "study" / "tiny-base.yaml"
