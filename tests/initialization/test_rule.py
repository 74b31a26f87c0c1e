"""The start-up line reports the initialization of the residual output projections."""

import copy
import re

import pytest
import torch
from support.drawn_models import constant, lecun, nanogpt, open_lm, torchtitan, wang, wide, zero

import olmo_lns


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            nanogpt,
            r"scaled initialization found \(o and down 0\.005\d?, others 0\.02\): call olmo_lns\.plain_initialization",
        ),
        (
            torchtitan,
            r"scaled initialization found \(o 0\.013 to 0\.005\d?, down 0\.014 to 0\.005, others 0\.02",
        ),
        (open_lm, r"scaled initialization found \(o 0\.12 to 0\.046, down 0\.073 to 0\.026, others 0\.18"),
        (constant, "scaled initialization off; measured: sites, output, gradient, initialization"),
        (lecun, "scaled initialization off; measured"),
        (zero, "scaled initialization off; measured"),
        (
            wang,
            r"initialization of the residual output projections follows no known rule \(o and down 0\.044, others 0\.11\)",
        ),
    ],
)
def test_apply_reports_the_initialization_and_changes_no_weight(rule, text, capfd):
    model = wide(rule)
    before = copy.deepcopy(model.state_dict())
    olmo_lns.apply(model)
    assert re.search(text, line := capfd.readouterr().err), line
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
