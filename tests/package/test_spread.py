"""A spread of parameters: few cases, with every combination that was named; the others are soaks."""

from itertools import product

import pytest
from spread import chosen

ROWS = {f"{a}-{b}-{c}": {"a": a, "b": b, "c": c} for a, b, c in product(range(9), range(4), range(4))}
PAIRS = [("a", "b"), ("a", "c"), ("b", "c")]


def combinations(names, groups=PAIRS) -> set[tuple]:
    return {(group, *(ROWS[name][key] for key in group)) for name in names for group in groups}


def test_every_named_combination_is_among_few_cases():
    found = chosen(ROWS, PAIRS)
    assert combinations(found) == combinations(ROWS)
    assert len(found) < len(ROWS) // 3      # 36 of 144 is the least


def test_combinations_that_no_case_has_are_not_missed():
    some = {name: ROWS[name] for name in sorted(ROWS)[::3]}
    assert combinations(chosen(some, PAIRS)) == combinations(some)


def test_the_order_of_cases_makes_no_difference():
    assert chosen(dict(reversed(ROWS.items())), PAIRS) == chosen(ROWS, PAIRS)


FILE = """
    import pytest

    @pytest.mark.spread({names})
    @pytest.mark.parametrize("b", [{{}}, {{1: 2}}, pytest.param(None, marks=pytest.mark.soak)], ids=["x", "y", "z"])
    @pytest.mark.parametrize("a", range(5))
    def test_it(a, b):
        pass

    def test_without_parameters():
        pass
"""
PLUGIN = """
    import pytest, spread

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items):
        spread.mark_soaks(items)
"""


@pytest.mark.parametrize(("names", "least", "most"), [('"a", "b"', 5, 6), ('"a b"', 10, 10), ('"a other"', 5, 5)])
def test_the_rest_of_the_product_is_a_soak(pytester, names, least, most):
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(FILE.format(names=names))
    done = pytester.runpytest("-m", "not soak", "-p", "no:cacheprovider")
    passed = done.parseoutcomes()["passed"] - 1
    assert least <= passed <= most
    done.assert_outcomes(passed=1 + passed, deselected=15 - passed)
    done = pytester.runpytest("-m", "soak", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=15 - passed, deselected=1 + passed)


@pytest.mark.parametrize("names", ["", '"c"', '"a", "c d"'])
def test_a_spread_over_no_parameter_of_the_test_is_an_error(pytester, names):
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(FILE.format(names=names))
    done = pytester.runpytest("-p", "no:cacheprovider")
    done.stderr.fnmatch_lines(["*test_it*spread over parameters that the test has not"])
