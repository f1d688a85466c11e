"""A mark for pytest: `@pytest.mark.prove("train.py", "--epochs", "1")` proves a script in place of the test's body."""

import pytest

from . import prove


def pytest_configure(config) -> None:
    config.addinivalue_line(
        "markers", "prove(*words): the command line of prove-training, which must not end with wrong"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    mark = pyfuncitem.get_closest_marker("prove")
    if mark is None:
        return None
    report = prove(*map(str, mark.args))
    if report["code"] in (1, 2):
        pytest.fail("\n".join(report["lines"]), pytrace=False)
    if report["code"] == 3:
        pytest.skip(report["verdict"])
    return True
