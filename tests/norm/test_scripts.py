"""The benchmark and GPU scripts, as far as a machine without a GPU can run them."""

import importlib.util
import json
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
