"""The benchmark and GPU scripts, as far as a machine without a GPU can run them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def run(*arguments, timeout=100):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / "gpu" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(monkeypatch):
    """A benchmark script's main, in this process."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name, *arguments: importlib.import_module(name).main([str(argument) for argument in arguments])


@without_cuda
@pytest.mark.parametrize("name", ["bench_step", "bench_schemes"])
def test_without_cuda_the_benchmarks_say_so(name, bench):
    with pytest.raises(SystemExit, match="^no CUDA device"):
        bench(name, "--device", "cuda")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--rounds", "0"], "'0'"), (["--sizes", "9B"], "'9B'")],
)
def test_bad_arguments_are_named(arguments, named, bench, capsys):
    with pytest.raises(SystemExit) as caught:
        bench("bench_step", *arguments)
    assert caught.value.code == 2 and named in capsys.readouterr().err.splitlines()[-1]


def test_bench_step_compares_the_arms(tmp_path, bench, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_NORM_BACKEND", "auto")  # the script sets it: restored after the test
    report = tmp_path / "report.json"
    assert (
        bench("bench_step", "--compile", "off", "--rounds", "2", "--warmup", "1", "--sequences", "1", "--json", report)
        == 0
    )
    (case,) = json.loads(report.read_text())["cases"]
    assert case["results"]["preln"]["norm"] == "olmo" and case["results"]["lns (auto)"]["norm"] == "torch"
    assert case["results"]["lns (auto)"]["ratio_to_preln"]["median"] > 0


def test_bench_schemes_names_the_work_of_each(tmp_path, bench, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_NORM_BACKEND", "auto")  # the script sets it: restored after the test
    report = tmp_path / "report.json"
    few = ["--rounds", "1", "--warmup", "1", "--sequences", "1", "--schemes", "lns", "sandwich", "skipinit"]
    assert bench("bench_schemes", *few, "--json", report) == 0
    (case,) = json.loads(report.read_text())["cases"]
    assert all(result["ratio_to_preln"]["median"] > 0 for result in case["results"].values())
    assert {name: result["extra_work"] for name, result in case["results"].items()} == {
        "preln": "none",
        "lns": "none",
        "sandwich": "16 more norms",
        "skipinit": "16 branches kept for the gradients of their gates",
    }


@without_cuda
@pytest.mark.slow
def test_without_cuda_te_ctypes_says_so(tmp_path):
    library = tmp_path / "libtransformer_engine.so"
    missing = run(SCRIPTS / "gpu/te_ctypes.py", library, "-m", "pytest")
    library.touch()
    shown = run(SCRIPTS / "gpu/te_ctypes.py", library, "-m", "pytest")
    assert missing.returncode == 1 and "is not a file" in missing.stderr
    assert shown.returncode == 1 and shown.stderr.startswith("no CUDA device")


def fatbin(members):
    """A container as nvcc embeds it: (kind, architecture, payload) each."""
    body = b""
    for kind, arch, payload in members:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 0, arch)
        body += header.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_slimming_keeps_one_architecture_and_every_offset(tmp_path, monkeypatch):
    slim_library = load("slim_library")
    first = fatbin([(2, 80, b"a" * 24), (2, 90, b"b" * 40), (1, 90, b"c" * 16)])
    second = fatbin([(2, 90, b"d" * 8), (2, 100, b"e" * 32)])
    section = first + b"\0" * (-len(first) % 8) + b"\0" * 8 + second
    library, output = tmp_path / "lib.so", tmp_path / "out" / "lib.so"
    library.write_bytes(b"start---" + section + b"end")
    monkeypatch.setattr(slim_library, "fatbin_section", lambda path: (8, len(section)))
    sizes = slim_library.slim(library, output, [90])
    before, after = library.read_bytes(), output.read_bytes()
    assert sizes == {"elf 80 emptied": 24, "elf 90 kept": 48, "ptx 90 emptied": 16, "elf 100 emptied": 32}
    assert len(after) == len(before) and after.startswith(b"start---") and after.endswith(b"end")
    assert after.count(b"b") == before.count(b"b")
    assert b"aaaa" not in after and b"cccc" not in after and b"eeee" not in after and b"d" * 8 in after
    with pytest.raises(SystemExit, match=r"no code for architecture \[75\].*\[80, 90, 100\]"):
        slim_library.slim(library, output, [75])


def test_the_signature_parser_on_a_declaration():
    parser = load("parse_te_signatures")
    header = """std::vector<py::object> rmsnorm_bwd(const at::Tensor &dz, const at::Tensor &x, const int sm_margin,
                                    const bool zero_centered_gamma);"""
    named = parser.signature("rmsnorm_bwd", header, 'm.def("rmsnorm_bwd", &rmsnorm_bwd, "Backward");')
    assert named["parameters"] == ["dz", "x", "sm_margin", "zero_centered_gamma"] and named["keywords"] is False
    binding = 'm.def("rmsnorm_bwd", &f, "", py::arg("a"), py::arg("b"),\n py::arg("c"), py::arg("d"));'
    assert parser.signature("rmsnorm_bwd", header, binding)["parameters"] == ["a", "b", "c", "d"]
    with pytest.raises(SystemExit, match="layernorm_fwd is not declared"):
        parser.signature("layernorm_fwd", header, binding)


def test_bench_generate_compares_the_arms(tmp_path, bench, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_NORM_BACKEND", "auto")  # the script sets it: restored after the test
    report = tmp_path / "report.json"
    assert bench("bench_generate", "--rounds", "2", "--warmup", "1", "--tokens", "2", "--json", report) == 0
    rms, layer = json.loads(report.read_text())["cases"]
    assert list(rms["results"]) == ["preln (rms)", "lns (lns_rms, auto)"]
    assert list(layer["results"]) == ["preln (default)", "lns (lns_default, auto)"]
    assert all(result["ratio_to_preln"]["median"] > 0 for result in (rms["results"] | layer["results"]).values())
    with pytest.raises(SystemExit, match="--tokens 999: small reads at most 256"):
        bench("bench_generate", "--tokens", "999")


def test_generation_is_that_of_the_model(bench, monkeypatch):
    """Token by token with the cache as with the whole text at once."""
    monkeypatch.setenv("OLMO_LNS_NORM_BACKEND", "auto")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench_step, bench_generate = (importlib.import_module(name) for name in ("bench_step", "bench_generate"))
    model = bench_step.build("small", "lns_rms", "auto", torch.device("cpu"), False).eval()
    text = torch.arange(1, 9)[None]
    last = bench_generate.generation(model, text, 3)()
    with torch.no_grad():
        for _ in range(3):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(last, text[:, -1:])


def test_bench_tools_times_a_command_and_says_when_it_fails(tmp_path, bench, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tools = importlib.import_module("bench_tools")
    monkeypatch.setitem(tools.COMMANDS, "--version", (("-m", "olmo_lns", "--version"), 60.0))
    monkeypatch.setitem(tools.COMMANDS, "import sys", (("-c", "import sys"), None))
    monkeypatch.setitem(tools.COMMANDS, "nothing", (("-m", "olmo_lns", "nothing"), 60.0))
    report = tmp_path / "report.json"
    assert bench("bench_tools", "--commands=--version", "--rounds", "1", "--json", report) == 0
    (row,) = json.loads(report.read_text())["commands"]
    assert 0 < row["seconds"]["median"] < 60 and "| olmo-lns --version |" in (out := capsys.readouterr().out)
    assert "| met |" in out
    assert bench("bench_tools", "--commands", "import sys", "--rounds", "1") == 0
    assert '| python -c "import sys" |' in (out := capsys.readouterr().out) and "met" not in out
    with pytest.raises(SystemExit, match="olmo_lns nothing ended with 2: .*no such command"):
        bench("bench_tools", "--commands", "nothing", "--rounds", "1")
