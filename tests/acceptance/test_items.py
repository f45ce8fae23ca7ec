"""The list of items is whole, every test that it names exists, and the page that it writes is in step."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.acceptance.items import ITEMS, PAGE, ROOT, SEEDS, acceptance_tests, page


def test_every_item_is_listed_once() -> None:
    counts = Counter(item.seed for item in ITEMS)
    assert counts == {"000": 48, "001": 57, "002": 40, "003": 25, "004": 28}
    assert len({(item.seed, item.text) for item in ITEMS}) == 198


@pytest.mark.parametrize("seed", SEEDS)
def test_tests_that_are_named_exist_and_each_belongs_to_an_item(seed: str) -> None:
    numbers = {item.number for item in ITEMS if item.seed == seed}
    stray = [name for name in acceptance_tests(seed) if not name[5:7].isdigit() or int(name[5:7]) not in numbers]
    assert stray == [], "a test of an item is called test_NN_what"
    for item in ITEMS:
        for test in item.shown_by if item.seed == seed else ():
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            assert path.is_file(), f"{seed}-{item.number}: {file}"
            assert f"def {name}(" in path.read_text(encoding="utf-8") or not name, f"{seed}-{item.number}: {test}"


def test_the_page_is_in_step() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.acceptance.items"


def test_a_refused_item_says_why() -> None:
    assert [item for item in ITEMS if item.refused and len(item.refused.split()) < 4] == []
