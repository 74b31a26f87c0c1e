"""`olmo-lns data prepare`: OLMo's data set reads the rows, a killed call resumes, and padding is evaluated right."""

import gzip
import json

import numpy as np
import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data import commands as data_check
from olmo_lns.study.data import corpora
from olmo_lns.study.data import prepare as data_prepare
from olmo_lns.study.data.prepare import documents
from olmo_lns.study.engines import OLMO

TEXTS = ["short", "a text that is longer than a row of sixteen", "", "ends exactly.15", "Grüße ✓", "last one"]


@pytest.fixture
def source(tmp_path):
    """Write JSON lines and a byte-level tokenizer: an id is a byte, and 256 ends a document."""
    corpora._write_tokenizer(tmp_path / "tokenizer.json")
    with gzip.open(tmp_path / "docs.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({"text": each}) for each in TEXTS) + "\n\n")
    return tmp_path


def words(source, *more, layout="rows", out="out"):
    return [
        "prepare", "jsonl", str(source / "docs.jsonl.gz"), "--out", str(source / out), "--layout", layout, "--sequence",
        "16", "--tokenizer", str(source / "tokenizer.json"), "--eos", "<|endoftext|>", "--pad", "0", *more,
    ]  # fmt: skip


def expected(each):
    return [*each.encode()[:15], 256]


def test_rows_are_cut_padded_and_masked(source, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.data.memmap_dataset import MemMapDataset

    assert data_check.main(words(source, "--shard", "4")) == 0
    out = source / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "tokenizer.json", "train-00000.mask", "train-00000.npy", "train-00001.mask", "train-00001.npy", "train.json",
    ]  # fmt: skip
    files = sorted(out.glob("train-*.npy")), sorted(out.glob("train-*.mask"))
    dataset = MemMapDataset(*files[0], chunk_size=16, memmap_dtype=np.uint16, label_mask_paths=list(files[1]))
    assert len(dataset) == len(TEXTS)
    for row, each in zip((dataset[n] for n in range(len(TEXTS))), TEXTS, strict=True):
        wanted = expected(each)
        assert row["input_ids"].tolist() == wanted + [0] * (16 - len(wanted))
        assert row["label_mask"].tolist() == [True] * len(wanted) + [False] * (16 - len(wanted))
    facts = json.loads((out / "train.json").read_text())
    assert (facts["documents"], facts["tokens"], facts["complete"]) == (6, sum(len(expected(t)) for t in TEXTS), True)
    assert "of the positions are real" in capsys.readouterr().out
    check = ["check", str(out), "--vocab-size", "257", "--eos", "256", "--budget", "0", "--sequence", "16"]
    assert data_check.main(check) == 0


def test_each_packed_document_ends_with_the_end_token(source):
    assert data_check.main(words(source, layout="packed")) == 0
    found = np.fromfile(source / "out" / "train-00000.npy", dtype=np.uint16)
    assert found.tolist() == [token for each in TEXTS for token in (*each.encode(), 256)]


def test_a_killed_preparation_resumes_to_the_same_files(source, monkeypatch):
    assert data_check.main(words(source, "--shard", "2", out="whole")) == 0
    real = data_prepare.documents

    def dies(*args, **kwargs):
        for number, each in enumerate(real(*args, **kwargs)):
            if number == 3:
                raise KeyboardInterrupt
            yield each

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(data_prepare, "documents", dies)
        data_check.main(words(source, "--shard", "2"))
    assert json.loads((source / "out" / "train.json").read_text())["documents"] == 2
    assert data_check.main(words(source, "--shard", "2")) == 0
    for path in sorted((source / "whole").iterdir()):
        assert path.read_bytes() == (source / "out" / path.name).read_bytes(), path.name
    with pytest.raises(LNSConfigError, match="was begun with shard 2, now 3"):
        data_check.main(words(source, "--shard", "3"))


def test_preparation_stops_at_its_number_of_tokens_and_a_larger_number_continues_it(source):
    for limit, wanted in (("10", 2), ("10", 2), ("30", 4)):
        assert data_check.main(words(source, "--shard", "2", "--tokens", limit)) == 0
        assert json.loads((source / "out" / "train.json").read_text())["documents"] == wanted


def test_an_end_token_that_the_tokenizer_adds_is_not_doubled(source):
    """The tokenizer of T5 ends a text with </s>; here the byte tokenizer does the same."""
    from tokenizers import Tokenizer, processors

    path = source / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    end = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 256)])
    tokenizer.save(str(path))
    assert data_check.main(words(source)) == 0
    rows = np.fromfile(source / "out" / "train-00000.npy", dtype=np.uint16).reshape(-1, 16)
    assert [row[row != 0].tolist() for row in rows] == [expected(each) for each in TEXTS]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--pad": "70000", "--dtype": "uint32"}, "--pad 70000: the ids of this tokenizer end at 256"),
        ({"--eos": "257", "--dtype": "uint32"}, "--eos 257: the ids of this tokenizer end at 256: give a token"),
        ({"--name": "../x"}, "--name ../x: expected letters"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_option_is_named(source, change, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LNSConfigError, match=message):
        data_check.main([*words(source), *(word for pair in change.items() for word in pair)])


def test_the_padding_factor_corrects_olmos_evaluation_of_padded_rows(source):
    """OLMo computes labels, losses and their average; the average times the factor is the mean over labelled tokens."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from types import SimpleNamespace

    from olmo.data.memmap_dataset import MemMapDataset
    from olmo.train import Trainer, cross_entropy_loss

    assert data_check.main(words(source)) == 0
    out = source / "out"
    settings = {
        "model.max_sequence_length": 16,
        "evaluators": [{"label": "heldout", "data": {"label_mask_paths": [str(out / "train-00000.mask")]}}],
    }
    dataset = MemMapDataset(
        out / "train-00000.npy", chunk_size=16, memmap_dtype=np.uint16, label_mask_paths=[out / "train-00000.mask"]
    )
    batch = {key: torch.stack([dataset[n][key] for n in range(len(TEXTS))]) for key in ("input_ids", "label_mask")}
    logits = torch.randn(len(TEXTS), 16, 257, generator=torch.Generator().manual_seed(0))
    trainer = SimpleNamespace(
        dist_model=lambda **_: SimpleNamespace(logits=logits), loss_fn=cross_entropy_loss,
        cfg=SimpleNamespace(autocast_precision=torch.bfloat16),
    )  # fmt: skip
    trainer.get_labels = lambda found: Trainer.get_labels(trainer, found)
    trainer.model_forward = lambda found, **options: Trainer.model_forward(trainer, found, **options)
    by_row, _ = Trainer.eval_batch(trainer, batch)
    logs = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    right = -logs[batch["label_mask"][:, 1:]].mean().item()
    assert by_row.mean().item() < 0.8 * right
    assert by_row.mean().item() * OLMO.padding(settings) == pytest.approx(right, rel=1e-6)
    settings["evaluators"][0]["subset_num_batches"] = 2
    with pytest.raises(LNSConfigError, match="all rows are needed, not a subset"):
        OLMO.padding(settings)
    settings["evaluators"] = [{"label": "heldout", "data": {"label_mask_paths": ["/nowhere.mask"]}}]
    with pytest.raises(LNSConfigError, match=r"/nowhere.mask is not there"):
        OLMO.padding(settings)


def test_a_second_call_with_other_options_or_files_is_refused(source):
    from tokenizers import Tokenizer

    call = words(source, "--shard", "2", "--rows", "4")
    assert data_check.main(call) == 0
    with pytest.raises(LNSConfigError, match="was begun with field 'text', now 'body': use another --out"):
        data_check.main([*call, "--field", "body"])
    lost = source / "out" / "train-00000.mask"
    mask = lost.read_bytes()
    for change, message in (
        (lambda: lost.write_bytes(mask[:-1]), "mask of train: 63 bytes, 64 were written: use another"),
        (lost.unlink, "train-00000.mask: written before, and not there now: put it back"),
    ):
        change()
        with pytest.raises(LNSConfigError, match=message):
            data_check.main(call)
    lost.write_bytes(mask)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(source / "other.json"))
    with pytest.raises(LNSConfigError, match="out/tokenizer.json: of another tokenizer than --tokenizer .*other.json"):
        data_check.main([*call, "--name", "validation", "--tokenizer", str(source / "other.json")])
    with gzip.open(source / "docs.jsonl.gz", "at") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(LNSConfigError, match="docs.jsonl.gz has changed since this was begun: .*use another --out"):
        data_check.main(call)


def test_text_files_are_documents_in_order_and_padding_must_fit_the_dtype(source):
    from tokenizers import Tokenizer, models

    for number, each in enumerate(TEXTS):
        (source / f"{number}.txt").write_text(each)
    assert list(data_prepare.documents("text", [str(source)], skip=1)) == TEXTS[1:]
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 70_000}, "a")).save(str(source / "tokenizer.json"))
    with pytest.raises(LNSConfigError, match="--pad <pad>: 70,000 does not fit uint16: --dtype uint32"):
        data_check.main([*words(source), "--eos", "</s>", "--pad", "<pad>"])


@pytest.mark.parametrize("content", ["", "[1]", '{"layout": {}, "words": 3}', '{"layout": []}'])
def test_a_record_that_the_command_did_not_write_is_refused(content, source):
    (source / "out").mkdir()
    (source / "out" / "train.json").write_text(content)
    with pytest.raises(LNSConfigError, match=r"out/train.json: no record of this command \(.*use another --out"):
        data_check.main(words(source))


_LINE = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.jsonl.gz", gzip.compress(_LINE * 5000)[:-20], "after line .*cannot be read"),
        ("latin.jsonl", _LINE + b'{"text": "\xe9"}\n', "cannot be read: .*utf-8"),
        ("other.jsonl", b'{"body": "a"}\n', "line 1: expected a JSON object with text under 'text'"),
    ],
)
def test_a_file_that_cannot_be_read_or_holds_no_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LNSConfigError, match=f"{name}.*{message}"):
        list(documents("jsonl", [str(tmp_path / name)]))
