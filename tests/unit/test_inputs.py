"""Data as people have them: used whole, or what is left out is named, or refused; none is silent."""

import pytest
from programs.inputs import IMAGES, SLOW, TARS, TEXT, TOKENS, judge

# Tar files are scanned in processes of their own, which takes a tenth of a second, and so does what `datasets` reads.
QUICK = [*TEXT[::4], *TOKENS, *IMAGES, *TARS[::10]]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("cases", [QUICK, pytest.param([*TEXT, *TARS, *SLOW], marks=pytest.mark.slow)])
def test_no_input_is_silent(cases):
    wrong = {case.name: outcome for case in cases if (outcome := judge(case)) not in ("used", "named", "refused")}
    assert not wrong
