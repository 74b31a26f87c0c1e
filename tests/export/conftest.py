"""LNS checkpoints in both OLMo formats, and folded exports of one; a test that changes one copies it first."""

import pytest
from support.exports import byte_tokenizer, export, save_olmo


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "checkpoint"
    save_olmo(folder, tokenizer=byte_tokenizer(folder.with_name("tokenizer.json")), layer_norm_type="lns_rms")
    return folder


@pytest.fixture(scope="session")
def folded(checkpoint):
    assert export(checkpoint, checkpoint.with_name("folded")) == 0
    return checkpoint.with_name("folded")


@pytest.fixture(scope="session")
def hf(checkpoint):
    assert export(checkpoint, checkpoint.with_name("hf"), "--format", "hf") == 0
    return checkpoint.with_name("hf")


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "sharded"
    save_olmo(folder, sharded=True, layer_norm_type="lns_rms")
    return folder
