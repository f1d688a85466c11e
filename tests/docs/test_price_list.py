"""Each promise of the README has its price in lines."""

import price_list
import pytest


def test_each_module_is_in_one_row_of_the_price_list():
    modules = [module for _, names in price_list.rows().values() for module in names]
    assert sum(map(price_list.lines_of, modules)) == sum(len(f.read_text().splitlines()) for f in price_list.MODULES)
    assert len(set(modules)) == len(modules)


@pytest.mark.parametrize("promise", price_list.rows())
def test_no_promise_costs_more_lines_than_the_price_list_says(promise):
    allowed, modules = price_list.rows()[promise]
    assert sum(map(price_list.lines_of, modules)) <= allowed
