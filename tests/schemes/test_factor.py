"""The factor is checked in rational arithmetic and by logarithms; a wrong layer_number or exponent is refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_lns import lns_factor


@given(st.integers(1, 10_000), st.floats(0, 4))
def test_the_factor_follows_the_formula(layer_number, exponent):
    # s² · l = 1 exactly, checked in rational arithmetic
    assert abs(Fraction(lns_factor(layer_number)) ** 2 * layer_number - 1) < Fraction(1, 10**14)
    found = math.log(lns_factor(layer_number, exponent=exponent))
    assert found == pytest.approx(-exponent * math.log(layer_number), abs=1e-12)


def test_a_numpy_integer_also_gives_a_python_float():
    assert type(lns_factor(np.int64(4))) is float and lns_factor(np.int64(4)) == 0.5
    assert lns_factor(10_000, exponent=8) == 1e-32


@pytest.mark.parametrize(
    ("number", "exponent", "error", "message"),
    [
        *(
            (wrong, 0.5, TypeError, "Expected an integer, which is 1 for the first block")
            for wrong in (1.0, "1", None, True, 2.5)
        ),
        *((wrong, 0.5, ValueError, f"layer_number is {wrong}. Expected an integer") for wrong in (0, -1)),
        *((1, wrong, ValueError, "finite number >= 0") for wrong in (-0.5, math.nan, math.inf)),
        *((1, wrong, ValueError, "exponent must be at most 8") for wrong in (8.1, 1e9)),
    ],
)
def test_a_wrong_layer_number_or_exponent_is_refused(number, exponent, error, message):
    with pytest.raises(error, match=message):
        lns_factor(number, exponent=exponent)
