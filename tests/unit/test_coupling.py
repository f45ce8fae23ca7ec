"""The page's table of combinations is what the validator says, and the trainer knows no axis."""

from __future__ import annotations

from tests.coupling import PAGE, in_page, table


def test_the_table_of_combinations_is_the_validators() -> None:
    assert in_page(PAGE.read_text(encoding="utf-8")) == table(), "run: python -m tests.coupling"
