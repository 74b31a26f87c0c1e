"""`olmo-lns data fetch` from a local server: equal shares, a killed fetch that goes on, other content refused."""

import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.study.data import commands, fetch

EOS = 50279


class Ranges(SimpleHTTPRequestHandler):
    """Adds byte ranges and an ETag to Python's own server; a test changes what it sends."""

    tag, cut, before = "", None, staticmethod(lambda: None)

    def do_GET(self):
        type(self).before()
        if not (path := Path(self.translate_path(self.path))).is_file():
            return self.send_error(404)
        whole = path.read_bytes()
        start, stop = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop}/{len(whole)}")
        self.send_header("Content-Length", str(stop + 1 - start))
        self.send_header("ETag", self.tag or '"first"')
        self.end_headers()
        self.wfile.write(whole[start : stop + 1][: self.cut])

    def log_message(self, *_): ...


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve two training files and a held-out one, and list them in ``list.txt``."""
    (tmp_path / "www").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path / "www")))
    Thread(target=server.serve_forever, daemon=True).start()
    lines = []
    for seed, (name, count) in enumerate({"a.npy": 20_000, "b.npy": 9_000, "heldout/c.npy": 5_000}.items()):
        ids = np.random.default_rng(seed).integers(5, 50_000, count).astype(np.uint16)
        ids[99::100] = EOS
        ids.tofile(tmp_path / "www" / f"{seed}.npy")
        lines.append(f"{name} http://127.0.0.1:{server.server_port}/{seed}.npy  # text\n")
    (tmp_path / "list.txt").write_text("# a list\n" + "".join(lines))
    monkeypatch.setattr(fetch, "CHUNK", 1000)
    for name in ("tag", "cut", "before"):  # set back after the test
        monkeypatch.setattr(Ranges, name, vars(Ranges)[name])
    yield tmp_path
    server.shutdown()
    server.server_close()


def call(served, *more):
    return commands.main(["fetch", str(served / "list.txt"), "--out", str(served / "out"), "--tokens", "16384", *more])


def test_equal_shares_are_fetched_and_a_partial_file_is_continued(served, capsys):
    Ranges.cut = 5000  # the connection ends
    with pytest.raises(LNSConfigError, match="Repeat the command to continue"):
        call(served)
    (part,) = (served / "out").rglob("*.part")
    assert part.stat().st_size == 5000
    Ranges.cut = None
    assert call(served) == 0
    for name, source, count in (("a", 0, 8192), ("b", 1, 8192), ("heldout/c", 2, 5000)):
        expected = (served / "www" / f"{source}.npy").read_bytes()[: 2 * count]
        assert (served / "out" / f"{name}.npy").read_bytes() == expected
    assert not list((served / "out").rglob("*.part")) and "export OLMO_DATA_DIR=" in capsys.readouterr().out
    assert call(served) == 0 and commands.main(["check", str(served / "out"), "--budget", "16384"]) == 0
    with pytest.raises(LNSConfigError, match=r"a.npy has 16,384 bytes, but 8,192 bytes of http\S+ were"):
        call(served, "--tokens", "8192")


def test_a_second_fetch_into_one_folder_is_refused_and_the_first_is_right(served):
    refused = []

    def second():
        if not refused:
            with pytest.raises(LNSError, match="Another fetch writes into") as caught:
                call(served)
            refused.append(caught)

    Ranges.before = staticmethod(second)
    assert call(served) == 0 and refused
    assert (served / "out" / "a.npy").read_bytes() == (served / "www" / "0.npy").read_bytes()[:16384]


def test_a_file_that_changes_on_the_server_is_refused(served):
    tags = iter(('"first"', '"second"'))

    def change():
        Ranges.tag = next(tags)

    Ranges.before = staticmethod(change)
    with pytest.raises(LNSConfigError, match="changed on the server"):
        call(served)


def test_a_wrong_line_of_the_list_is_named(served):
    server = re.findall(r"http://[\d.:]+", (served / "list.txt").read_text())[0]
    for text, message in (
        ("../a.npy http://127.0.0.1/a\n", "line 1"),
        (f"a.npy {server}/none.npy\n", "404 Client Error"),
    ):
        (served / "list.txt").write_text(text)
        with pytest.raises(LNSConfigError, match=message):
            call(served)
