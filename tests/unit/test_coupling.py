"""The page's table of combinations is what the validator says, and the trainer knows no axis."""

from __future__ import annotations

import pytest

from tests.coupling import FEATURES, PAGE, combines, in_page, refusal, table

COLUMNS = (0, 8, 12)


@pytest.mark.slow
def test_the_table_of_combinations_is_the_validators() -> None:
    assert in_page(PAGE.read_text(encoding="utf-8")) == table(), "run: python -m tests.coupling"


@pytest.mark.parametrize("column", COLUMNS, ids=[FEATURES[column].name for column in COLUMNS])
def test_columns_of_the_table_are_the_validators(column: int) -> None:
    head, _, *rows = in_page(PAGE.read_text(encoding="utf-8")).splitlines()[: 2 + len(FEATURES)]
    assert [cell.strip() for cell in head.split("|")[2:-1]] == [feature.name for feature in FEATURES]
    for line, feature in list(zip(rows, FEATURES, strict=True))[column + 1 :]:
        cell = line.split("|")[column + 2].strip()
        if combines(feature, FEATURES[column]):
            assert (cell == "yes") == (refusal(feature, FEATURES[column]) is None), feature.name
