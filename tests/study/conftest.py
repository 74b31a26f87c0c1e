import os

import pytest
from support.studies import REPOSITORY, Built


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Describe a study of two sizes and two arms, with data and settings for OLMo; a test decides which runs finish."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.npy").write_bytes(bytes(range(256)) * 64)
    monkeypatch.setitem(os.environ, "OLMO_DATA_DIR", str(data))
    monkeypatch.setitem(os.environ, "OLMO_SAVE_DIR", str(tmp_path / "out"))
    steps = {"max_duration": 20, "scheduler.t_warmup": 2}
    description = {
        "name": "synthetic",
        "config": str(REPOSITORY / "configs" / "study" / "tiny-base.yaml"),
        "sizes": {
            "a": {"model.n_layers": 2, "model.d_model": 48, **steps},
            "b": {"model.n_layers": 4, "model.d_model": 96, **steps},
        },
        "arms": ["preln", "lns"],
        "seeds": [1],
        "more_seeds": {"a": [2]},
        "final_fraction": 0.1,
    }
    result = Built(tmp_path / "study.yaml", tmp_path / "out", description)
    result.save()
    return result
