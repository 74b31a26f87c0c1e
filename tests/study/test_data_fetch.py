"""`olmo-lns data fetch` from a local server: what is copied, what OLMo reads without a copy, what Megatron reads."""

import hashlib
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data import commands as check
from olmo_lns.study.data import fetch

REPOSITORY = Path(__file__).resolve().parents[2]
EOS = 50279


class Ranges(SimpleHTTPRequestHandler):
    """Adds byte ranges, an ETag and, on demand, another answer to Python's own server."""

    tag, before = "", staticmethod(lambda start: None)

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None or not path.is_file():
            return super().do_GET()
        start, stop = int(wanted[1]), int(wanted[2]) + 1
        type(self).before(start)
        whole = path.read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{min(stop, len(whole)) - 1}/{len(whole)}")
        self.send_header("ETag", f'"{self.tag}"')
        self.end_headers()
        self.wfile.write(whole[start:stop])
        return None

    def log_message(self, *_): ...


@pytest.fixture
def served(tmp_path):
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
    yield tmp_path
    Ranges.tag, Ranges.before = "", staticmethod(lambda start: None)
    server.shutdown()
    server.server_close()


def call(served, *more):
    return check.main(["fetch", str(served / "list.txt"), "--out", str(served / "out"), "--tokens", "16384", *more])


def test_equal_shares_are_fetched_and_a_partial_file_is_continued(served, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "REQUEST", 1000)

    def stop_at(start):
        if start >= 5000:
            raise KeyboardInterrupt

    real = fetch._read
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fetch, "_read", lambda url, start, stop: (stop_at(start), real(url, start, stop))[1])
        call(served)
    (part,) = (served / "out").rglob("*.part")
    assert part.stat().st_size == 5000
    asked = []
    Ranges.before = staticmethod(asked.append)
    assert call(served) == 0 and asked[:3] == [0, 5000, 6000]
    for name, source, count in (("a", 0, 8192), ("b", 1, 8192), ("heldout/c", 2, 5000)):
        wanted = (served / "www" / f"{source}.npy").read_bytes()[: 2 * count]
        assert (served / "out" / f"{name}.npy").read_bytes() == wanted
    assert not list((served / "out").rglob("*.part")) and "export OLMO_DATA_DIR=" in capsys.readouterr().out
    assert call(served) == 0 and check.main(["check", str(served / "out"), "--budget", "16384"]) == 0
    with pytest.raises(LNSConfigError, match=r"a.npy: 16,384 bytes, but of http\S+ 8,192 are wanted: remove one"):
        call(served, "--tokens", "8192")


def test_a_second_fetch_into_one_folder_is_refused_and_the_first_is_right(served, monkeypatch):
    monkeypatch.setattr(fetch, "REQUEST", 1000)
    refused = []

    def second(start):
        if start == 3000 and not refused:
            with pytest.raises(LNSConfigError, match="another fetch writes into this folder") as caught:
                call(served)
            refused.append(caught)

    Ranges.before = staticmethod(second)
    assert call(served) == 0 and refused
    assert (served / "out" / "a.npy").read_bytes() == (served / "www" / "0.npy").read_bytes()[:16384]


def test_a_file_that_changes_on_the_server_or_is_not_what_its_tag_says_is_refused(served, monkeypatch):
    monkeypatch.setattr(fetch, "REQUEST", 1000)
    content = (served / "www" / "2.npy").read_bytes()
    Ranges.tag = hashlib.md5(content).hexdigest()
    (served / "list.txt").write_text((served / "list.txt").read_text().splitlines()[3])
    assert call(served) == 0
    (served / "out" / "heldout" / "c.npy").unlink()
    Ranges.tag = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(LNSConfigError, match="sha256 .* came, the server has"):
        call(served)
    assert not list((served / "out").rglob("*.np*"))

    def change(start):
        Ranges.tag = "v1" if start < 3000 else "v2"

    Ranges.before = staticmethod(change)
    with pytest.raises(LNSConfigError, match="the file changed on the server"):
        call(served)


def test_olmo_reads_the_same_sequences_from_the_server_as_from_copies(served, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.data import build_memmap_dataset

    from olmo_lns.study.engines.olmo import load

    assert call(served, "--stream") == 0 and not list((served / "out").glob("*.npy"))
    (words,) = re.findall(r"--data.paths=\[(.*)\]", capsys.readouterr().out)
    assert call(served, "--tokens", "1e6") == 0  # whole files
    sets = []
    for paths in (words.split(","), [str(served / "out" / name) for name in ("a.npy", "b.npy")]):
        config = load(REPOSITORY / "configs" / "olmo" / "60M-lns.yaml", {"data.paths": paths})
        sets.append(build_memmap_dataset(config, config.data))
    streamed, copied = sets
    assert len(streamed) == len(copied) == 20_000 // 4096 + 9_000 // 4096
    for number in range(len(streamed)):
        assert streamed[number]["input_ids"].equal(copied[number]["input_ids"])


def test_megatron_reads_the_documents_that_were_fetched(served, capsys):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    assert call(served) == 0
    assert check.main(["megatron", str(served / "out"), "--out", str(served / "megatron")]) == 0
    prefix = served / "megatron" / "a"
    assert f"export MEGATRON_DATA='8192 {prefix} 8192 {served}/megatron/b'" in capsys.readouterr().out
    assert not list((served / "megatron").glob("c*"))  # held-out text is not converted
    data, ids = IndexedDataset(str(prefix)), np.fromfile(served / "out" / "a.npy", np.uint16)
    assert len(data) == 82 and [len(data[0]), len(data[81])] == [100, 92]
    assert np.concatenate([data[number] for number in range(82)]).tolist() == ids.tolist()
    assert check.main(["check", str(served / "megatron"), "--budget", "16384"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("../a.npy http://127.0.0.1/a\n", "line 1"),
        ("a.npy {server}/none.npy\n", r"none.npy: the server answers no byte ranges|HTTP 404"),
    ],
)
def test_a_wrong_line_of_the_list_is_named(served, text, message, monkeypatch):
    monkeypatch.setattr(fetch.time, "sleep", lambda _: None)
    server = re.findall(r"http://[\d.:]+", (served / "list.txt").read_text())[0]
    (served / "list.txt").write_text(text.replace("{server}", server))
    with pytest.raises(LNSConfigError, match=message):
        call(served)
