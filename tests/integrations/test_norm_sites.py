"""The factors of the start-up line, against the plans of the scheme."""

from __future__ import annotations

import pytest

from olmo_lns.integrations.norm_sites import factors_in_words
from olmo_lns.schemes import Scheme


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lns", "s = 1 (block 1) to 0.2887 (block 12)"),
        ("lnsafterbranch", "branch_scale = 1 (block 1) to 0.2887 (block 12)"),
        ("lnsafterattn", "branch_scale = 1 (block 1) to 0.2887 (block 12), attn only"),
        ("lnsafterff", "branch_scale = 1 (block 1) to 0.2887 (block 12), ff only"),
    ],
)
def test_a_factor_of_one_sub_layer_is_said_of_that_one(name: str, words: str) -> None:
    assert factors_in_words(Scheme.of(name), 12) == [words]
    assert factors_in_words(Scheme.of(name), 1) == []
