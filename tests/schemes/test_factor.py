from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_lns import lns_scale


@given(st.integers(1, 10_000))
def test_default_is_one_over_sqrt(layer_number):
    # s² · l = 1 exactly, checked in rational arithmetic
    assert abs(Fraction(lns_scale(layer_number)) ** 2 * layer_number - 1) < Fraction(1, 10**14)


@given(st.integers(1, 1000), st.floats(0, 4))
def test_exponent(layer_number, exponent):
    assert math.log(lns_scale(layer_number, exponent=exponent)) == pytest.approx(
        -exponent * math.log(layer_number), abs=1e-12
    )


def test_a_python_float_also_from_numpy_integers():
    assert type(lns_scale(np.int64(4))) is float and lns_scale(np.int64(4)) == 0.5


@pytest.mark.parametrize("wrong", [1.0, "1", None, True, 2.5])
def test_non_integers_are_refused(wrong):
    with pytest.raises(TypeError, match="integer >= 1"):
        lns_scale(wrong)


@pytest.mark.parametrize("wrong", [0, -1])
def test_layer_numbers_are_one_based(wrong):
    with pytest.raises(ValueError, match=f"1-based.*got {wrong}"):
        lns_scale(wrong)


@pytest.mark.parametrize("wrong", [-0.5, math.nan, math.inf])
def test_exponents_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="finite number >= 0"):
        lns_scale(1, exponent=wrong)


def test_exponents_that_would_make_zeros_are_refused():
    assert lns_scale(10_000, exponent=8) == 1e-32
    for wrong in (8.1, 1e9):
        with pytest.raises(ValueError, match="exponent must be at most 8"):
            lns_scale(1, exponent=wrong)
