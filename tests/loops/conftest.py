"""`note` writes down what a row came to, for docs/supported.md (`make tables`)."""

import pytest

from golden import note_row
from loops.cases import PRESERVED


@pytest.fixture
def note():
    def write(row, results):
        """results: setting -> (rho, bound), or the sentence of a refusal."""
        if row.outcome == PRESERVED:
            for setting, (rho, bound) in results.items():
                assert rho <= bound, f"{row}, {setting}: rho {rho:.1e}, and rounding explains {bound:.1e}"
        note_row("loops", **vars(row), results=results)

    return write
