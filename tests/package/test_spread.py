"""A spread of parameters: few cases, with every combination that was named; the others are soaks."""

from itertools import product

import pytest
from spread import chosen, mark_soaks

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


@pytest.mark.spread("a", "b")
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_by_default_few_of_sixteen_cases_run(a, b, request):
    if request.config.option.markexpr == "not soak":
        assert sum(item.originalname == request.node.originalname for item in request.session.items) < 8


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


@pytest.mark.parametrize(("names", "least", "most"), [('"a", "b"', 5, 6), ('"a b"', 10, 10), ('"a other"', 5, 5)])
def test_the_rest_of_the_product_is_a_soak(pytester, names, least, most):
    items = pytester.getitems(FILE.format(names=names))
    mark_soaks(items)
    assert len(items) == 16
    assert least <= sum(item.get_closest_marker("soak") is None for item in items) - 1 <= most


@pytest.mark.parametrize("names", ["", '"c"', '"a", "c d"'])
def test_a_spread_over_no_parameter_of_the_test_is_an_error(pytester, names):
    with pytest.raises(pytest.UsageError, match="test_it.*spread over parameters that the test has not"):
        mark_soaks(pytester.getitems(FILE.format(names=names)))
