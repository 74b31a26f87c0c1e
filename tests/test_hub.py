"""An unreachable hub is reported at once, and files in the cache are still used."""

import json
import time

import pytest

from olmo_lns import hub
from olmo_lns.errors import LNSError

constants = pytest.importorskip("huggingface_hub.constants", reason="the hub's client: pip install 'olmo-lns[hf]'")


@pytest.fixture(autouse=True)
def unreachable(monkeypatch, tmp_path):
    """The hub is a port that nobody listens on; the cache holds one model."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub._connects.cache_clear()
    snapshot = tmp_path / "cache" / "models--somebody--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    return tmp_path


def test_a_cached_file_is_used_without_the_hub():
    import huggingface_hub

    if huggingface_hub.try_to_load_from_cache("somebody/model", "config.json") is None:
        pytest.skip("this client reads the cache's path only at import")
    assert hub.cached_only("somebody/model", "config.json") and not hub.cached_only("/", "config.json")
    with pytest.raises(LNSError, match="not in the cache of the Hugging Face hub"):
        hub.cached_only("somebody/model", "tokenizer.json")


def test_a_model_that_is_not_cached_fails_at_once():
    start = time.monotonic()
    for name in ("gpt2", "a/b/c", "--"):
        with pytest.raises(LNSError, match=r"the hub cannot be reached \(http://127.0.0.1:9\)"):
            hub.cached_only(name, "config.json")
    assert time.monotonic() - start < 2 * hub.PATIENCE


def test_a_host_that_never_answers_is_not_waited_for(monkeypatch):
    def hanging(*args, **kwargs):
        time.sleep(20)
        raise TimeoutError

    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    monkeypatch.setattr(hub.socket, "create_connection", hanging)
    start = time.monotonic()
    assert not hub.reachable() and time.monotonic() - start < 15


def test_a_proxy_counts_as_a_reachable_hub(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert hub.reachable()
