"""Functions of an upstream are replaced once and only if they were verified; an error names the others."""

import sys

import pytest

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations.patching import Target, fingerprint, is_patched, replace, replace_all

SOURCE = """
class Upstream:
    @classmethod
    def build(cls, a, b=2):
        "What it does."
        return (cls.__name__, a, b)

    @staticmethod
    def plain(a):
        return a

    def method(self, a):
        return a + 1


def function(a):
    return a
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """A real module with a source file, like an upstream's."""
    (tmp_path / "lns_fake_upstream.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lns_fake_upstream", raising=False)
    import lns_fake_upstream

    yield lns_fake_upstream
    del sys.modules["lns_fake_upstream"]


def target(upstream, path):
    unverified = Target(f"lns_fake_upstream:{path}", {})
    owner, name, _ = unverified.locate()
    return Target(unverified.path, {fingerprint(getattr(owner, name)): "1.0"})


def doubled(function):
    def wrapped(*args, **kwargs):
        return (function(*args, **kwargs), "wrapped")

    return wrapped


def test_class_static_and_plain_functions_keep_their_kind_and_are_wrapped_once(upstream):
    thing, paths = upstream.Upstream(), ("Upstream.build", "Upstream.plain", "Upstream.method", "function")
    pairs = [(target(upstream, path), doubled) for path in paths]
    for _ in range(2):
        replace_all(pairs)
    assert not replace(*pairs[0])
    assert thing.build(1) == (("Upstream", 1, 2), "wrapped") == upstream.Upstream.build(1)
    assert thing.plain(3) == (3, "wrapped") and upstream.function(4) == (4, "wrapped") and thing.method(1)[0] == 2
    assert upstream.Upstream.build.__doc__ == "What it does." and is_patched(upstream.Upstream.__dict__["build"])
    assert isinstance(upstream.Upstream.__dict__["build"], classmethod)


def test_a_missing_or_changed_symbol_is_named_and_nothing_is_replaced(upstream, monkeypatch, caplog):
    good, changed = target(upstream, "function"), Target("lns_fake_upstream:function", {"0123456789abcdef": "1.0"})
    for path in ("Upstream.gone", "Gone.method"):
        with pytest.raises(UpstreamChangedError, match=f"lns_fake_upstream:{path} does not exist.*verified in 1.0"):
            replace_all([(good, doubled), (Target(f"lns_fake_upstream:{path}", {"0": "1.0"}), doubled)])
    with pytest.raises(UpstreamChangedError, match=r"function in .*lns_fake_upstream.py.*OLMO_LNS_ALLOW_UNVERIFIED=1"):
        replace(changed, doubled)
    assert upstream.function(1) == 1
    monkeypatch.setenv("OLMO_LNS_ALLOW_UNVERIFIED", "1")
    replace(changed, doubled)
    assert upstream.function(1) == (1, "wrapped") and "none of those verified" in caplog.text


def test_fingerprint_sees_a_changed_default_but_not_indentation(upstream, tmp_path):
    def load(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return fingerprint(__import__(name).f)

    one = load("lns_fp_one", "def f(a=1):\n    return a\n")
    assert load("lns_fp_two", "def f(a=2):\n    return a\n") != one
    assert load("lns_fp_three", "if True:\n    def f(a=1):\n        return a\n") == one
