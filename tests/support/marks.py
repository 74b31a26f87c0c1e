"""Marks of tests, as pyproject.toml explains them."""

import pytest

#: The case repeats the claim of a case that runs daily.
EXHAUSTIVE = [pytest.mark.slow, pytest.mark.exhaustive]
