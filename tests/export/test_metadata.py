"""Metadata of distributed checkpoints are read without running code."""

import os
import pickle

import pytest
import torch
from torch.distributed import checkpoint

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.metadata import read_metadata


class Hostile:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_what_torch_has_written_is_read(tmp_path):
    state = {"model.a": torch.ones(2, 3, dtype=torch.bfloat16), "b": {"c": torch.ones(4).long(), "d": 3}}
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    found, expected = read_metadata(tmp_path), checkpoint.FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata and found.storage_data == expected.storage_data


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_function_in_the_metadata_never_runs(tmp_path, protocol):
    marker = tmp_path / "ran"
    for hostile in (Hostile(os.mkdir, str(marker)), Hostile(eval, f"__import__('os').mkdir({str(marker)!r})")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": hostile}, protocol))
        with pytest.raises(LNSConfigError, match="it names"):
            read_metadata(tmp_path)
    # A name with a dot reaches through an allowed module.
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.")
    with pytest.raises(LNSConfigError, match="it names"):
        read_metadata(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_damaged_metadata_are_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(LNSConfigError, match="cannot be loaded"):
        read_metadata(tmp_path)
