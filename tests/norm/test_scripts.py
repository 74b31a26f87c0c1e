"""The benchmark and GPU scripts, as far as a machine without a GPU can run them."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, SCRIPTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_benchmark_compares_ours_with_stock_and_stock_with_itself(tmp_path, capsys):
    bench, report = load("bench.py"), tmp_path / "report.json"
    assert bench.median_and_interval(range(21)) == (10, 5, 15) and bench.median_and_interval(range(6)) == (2.5, 0, 5)
    assert bench.main(["--rounds", "6", "--warmup", "1", "--json", str(report)]) == 0
    cases = json.loads(report.read_text())["cases"]
    assert [name.split(",")[0] for name in cases] == ["norm rms"] * 2 + ["norm default"] * 2 + ["step small"]
    for results in cases.values():
        assert list(results) == ["stock", "stock, again", "lns"] and results["stock"]["ratio"] == [1, 1, 1]
        median, low, high = results["lns"]["ratio"]
        assert 0 < low <= median <= high
    assert "| step small | lns | " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_and_with_wrong_arguments_one_line_is_said(tmp_path, capsys):
    bench, kernels = load("bench.py"), load("gpu/te_ctypes.py")
    with pytest.raises(SystemExit, match="^no CUDA device"):
        bench.main(["--device", "cuda"])
    with pytest.raises(SystemExit):
        bench.main(["--rounds", "5"])
    assert "expected at least 6" in capsys.readouterr().err
    library = tmp_path / "libtransformer_engine.so"
    with pytest.raises(SystemExit, match="is not a file"):
        kernels.main([str(library), "-m", "pytest"])
    library.touch()
    with pytest.raises(SystemExit, match="^no CUDA device"):
        kernels.main([str(library), "-m", "pytest"])


def fatbin(members):
    """A container as nvcc embeds it: (kind, architecture, payload) each."""
    body = b""
    for kind, arch, payload in members:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 0, arch)
        body += header.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_slimming_keeps_one_architecture_and_every_offset(tmp_path, monkeypatch):
    slim_library = load("gpu/slim_library.py")
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
