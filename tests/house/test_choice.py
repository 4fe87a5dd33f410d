"""The cases of the default run: every value, every value with every backend, and few of them."""

from __future__ import annotations

import itertools

from tests.support.choice import chosen_cases

DTYPES, SIZES, BACKENDS = ("f16", "bf16", "f32"), ("1", "7", "64", "100"), ("cpu", "raw", "numba")


def test_each_value_is_tried_with_each_backend():
    values = list(itertools.product(DTYPES, SIZES, BACKENDS))
    chosen = [values[n] for n in chosen_cases([(case, True) for case in values])]
    for size, backend in itertools.product(SIZES, BACKENDS):
        assert any(case[1:] == (size, backend) for case in chosen)
    for dtype, backend in itertools.product(DTYPES, BACKENDS):
        assert any((case[0], case[2]) == (dtype, backend) for case in chosen)
    assert len(chosen) == len(SIZES) * len(BACKENDS)
    assert chosen_cases([(case, True) for case in values]) == [values.index(case) for case in chosen]


def test_without_a_backend_each_value_is_tried_once():
    values = list(itertools.product(DTYPES, SIZES))
    chosen = [values[n] for n in chosen_cases([(case, False) for case in values])]
    assert {case[0] for case in chosen} == set(DTYPES)
    assert {case[1] for case in chosen} == set(SIZES)
    assert len(chosen) == len(SIZES)


def test_a_test_without_parameters_is_chosen():
    assert chosen_cases([((), False)]) == [0]
    assert chosen_cases([(("cpu",), True), (("raw",), True)]) == [0, 1]
