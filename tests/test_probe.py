"""The probe finds the norms through which a block reads its stream. Whole models: tests/integrations/test_kinds.py."""

import inspect

import pytest
import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError

D = 16
CALL = probe.Call((torch.randn(2, 8, D, generator=torch.Generator().manual_seed(1)),), {}, 0)


def test_the_example_of_the_docstring_gives_what_it_says():
    lines = inspect.getdoc(probe).split(".. code-block:: python\n\n")[1].split("\n\nRead the")[0].splitlines()
    *code, last = [line[4:] for line in lines]
    call, expected = last.split("  # ")
    names = {"torch": torch, "probe": probe}
    exec("\n".join(code), names)
    assert eval(call, names) == eval(expected) == ("norm1", "norm2")


class PreLN(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def mix(self, x):
        return self.attn(x).cumsum(1)

    def mlp(self, x):
        return self.down(self.up(x).relu())

    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + self.mlp(self.norm2(y))


class PostLN(PreLN):
    def forward(self, x):
        y = self.norm1(x + self.mix(x))
        return self.norm2(y + self.mlp(y))


class Bypassed(PreLN):
    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + self.mlp(y)


class FunctionalSandwich(PreLN):
    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + torch.nn.functional.layer_norm(self.mlp(self.norm2(y)), (D,))


class FunctionalSandwichOfCubes(FunctionalSandwich):
    """Half of the norm's output makes the branch an eighth, where the eps of the last norm matters."""

    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + torch.nn.functional.rms_norm(self.mlp(self.norm2(y)), (D,), eps=3e-4)

    def mlp(self, x):
        return self.down(self.up(x).relu() ** 3)


class EachExample(PreLN):
    """Its branches end in a function that normalizes all positions of an example together."""

    def forward(self, x):
        for branch, norm in ((self.mix, self.norm1), (self.mlp, self.norm2)):
            x = x + torch.nn.functional.layer_norm(branch(norm(x)), x.shape[1:])
        return x


class OneBranch(PreLN):
    def forward(self, x):
        return x + self.mlp(self.norm1(x) * self.norm2(x))


class BypassedWithGradients(PreLN):
    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + self.mlp(y if torch.is_grad_enabled() and not self.training else self.norm2(y))


class BypassedInTraining(PreLN):
    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + self.mlp(y if self.training else self.norm2(y))


class BypassedInTrainingWithoutGradients(PreLN):
    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + self.mlp(y if self.training and not torch.is_grad_enabled() else self.norm2(y))


class BypassedUnderAutocast(PreLN):
    def forward(self, x):
        y = x + self.mix(self.norm1(x))
        return y + self.mlp(y if torch.is_autocast_enabled("cpu") else self.norm2(y))


@pytest.mark.parametrize(
    "block, reason",
    [
        (PostLN, "it reads its stream elsewhere than through its norms"),
        (Bypassed, "it reads its stream elsewhere than through its norms"),
        (FunctionalSandwich, r"ends in a norm that is a function \(Sandwich-LN\)"),
        (EachExample, r"ends in a norm that is a function \(Sandwich-LN\)"),
        (FunctionalSandwichOfCubes, r"ends in a norm that is a function \(Sandwich-LN\)"),
        (OneBranch, "it has one branch, after norm1 and norm2"),
        (BypassedWithGradients, "in eval mode with gradients its branches bypass norm1 and norm2"),
        (BypassedInTraining, "in training mode its branches bypass norm1 and norm2"),
        (BypassedInTrainingWithoutGradients, "in training mode its branches bypass norm1 and norm2"),
        (BypassedUnderAutocast, "under autocast its branches bypass norm1 and norm2"),
    ],
)
def test_a_block_that_a_scheme_cannot_scale_is_refused_with_the_reason(block, reason):
    with pytest.raises(LNSConfigError, match=reason):
        probe.pre_ln_sites(block(), CALL)


class WithAnotherOutput(PreLN):
    """It also returns a norm of the stream, on which the stream after the block does not depend."""

    def __init__(self):
        super().__init__()
        self.norm3 = nn.LayerNorm(D)

    def forward(self, x):
        return super().forward(x), self.norm3(x)


class ParallelWithAnotherOutput(WithAnotherOutput):
    def forward(self, x):
        h = self.norm1(x)
        return x + self.attn(h.cumsum(1)) + self.mlp(h), self.norm3(x)


@pytest.mark.parametrize(
    "block, names", [(WithAnotherOutput, ("norm1", "norm2")), (ParallelWithAnotherOutput, ("norm1",))]
)
def test_a_norm_without_effect_on_the_stream_is_no_site(block, names):
    assert probe.pre_ln_sites(block(), CALL).names == names


class NormalizedLinear(nn.Linear):
    """Normalizes its input, as the linear layers of BitNet do."""

    def forward(self, x):
        return super().forward(torch.nn.functional.rms_norm(x, x.shape[-1:]))


def test_a_wide_branch_that_ignores_the_size_of_its_norm_does_not_end_in_a_norm():
    block, width = PreLN(), 128
    block.norm1, block.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
    block.attn, block.up, block.down = (NormalizedLinear(width, width, bias=False) for _ in range(3))
    call = probe.Call((torch.randn(1, 8, width, generator=torch.Generator().manual_seed(1)),), {}, 0)
    assert probe.pre_ln_sites(block, call).names == ("norm1", "norm2")


class LargerInTraining(PreLN):
    def mlp(self, x):
        return super().mlp(x) * (2.0 if self.training else 1.0)


class LargerWithGradients(PreLN):
    def mlp(self, x):
        return super().mlp(x) * (2.0 if torch.is_grad_enabled() else 1.0)


@pytest.mark.parametrize("block", [LargerInTraining, LargerWithGradients])
def test_a_block_may_compute_something_else_in_another_mode(block):
    assert probe.pre_ln_sites(block(), CALL).names == ("norm1", "norm2")


def test_a_block_is_probed_in_few_runs():
    runs = []

    class Counted(PreLN):
        def forward(self, x):
            runs.append(torch.is_grad_enabled())
            return super().forward(x)

    probe.pre_ln_sites(Counted(), CALL)
    assert len(runs) <= 30


def test_the_second_block_of_a_structure_has_the_result_of_the_first_and_a_different_block_has_its_own():
    first = probe.pre_ln_sites(PreLN(), CALL)
    assert probe.pre_ln_sites(PreLN(), CALL, earlier=first) is first

    class Doubled(PreLN):
        def mlp(self, x):
            return 2 * super().mlp(x)

    other = probe.pre_ln_sites(Doubled(), CALL, earlier=first)
    assert other is not first and other.names == first.names == ("norm1", "norm2")


def test_the_probe_neither_changes_the_block_nor_the_random_state():
    block, state = PreLN(), torch.get_rng_state()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    probe.pre_ln_sites(block, CALL)
    torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)
    assert block.training and torch.equal(torch.get_rng_state(), state)


class NoAutocast(PreLN):
    def mlp(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no kernel for bf16")
        return super().mlp(x)


def test_the_log_names_a_block_that_was_not_checked_under_autocast(caplog):
    with caplog.at_level("INFO", logger="olmo_lns"):
        assert probe.pre_ln_sites(NoAutocast(), CALL).names == ("norm1", "norm2")
    assert (
        "NoAutocast does not run under autocast, so it was not checked there: RuntimeError: no kernel for bf16"
        in caplog.text
    )
