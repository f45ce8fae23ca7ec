from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.config.pattern import matches, select, select_trees
from tessera.errors import TesseraError

LAYERS = [f"text.layers.{i}" for i in range(50)]
PATHS = [*LAYERS, *(f"{p}.attn" for p in LAYERS), *(f"vision.blocks.{i}.mlp.up" for i in range(4)), "text.norm"]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("text.norm", 1),
        ("text.layers.{*}", 50),
        ("text.layers.*", 50),
        ("text.layers.{0-23}", 24),
        ("text.layers.{1,3,5}", 3),
        ("text.layers.{0-20,22-40}", 40),
        ("text.layers.?", 10),
        ("{text,vision}.{layers,blocks}.{0-1}", 2),
        ("vision.blocks.{0-1}.mlp.{*}", 2),
        ("text.layers.{2-3}.at*", 2),
    ],
)
def test_grammar(pattern: str, count: int) -> None:
    assert len(select([pattern], PATHS, "test")) == count


def test_a_segment_glob_never_crosses_a_dot() -> None:
    assert not matches("text.*", "text.layers.0")
    assert not matches("text.layers.{1}", "text.layers.11")
    assert matches("a.b-c_d", "a.b-c_d")


def test_order_is_that_of_the_paths_and_each_is_taken_once() -> None:
    assert select(["text.layers.{3,1}", "text.layers.{1-2}"], PATHS, "t") == [f"text.layers.{i}" for i in (1, 2, 3)]


def test_a_module_takes_what_is_below_it() -> None:
    assert select_trees(["vision"], PATHS, "t") == [p for p in PATHS if p.startswith("vision.")]


def test_no_match_names_the_nearest_path() -> None:
    with pytest.raises(TesseraError) as caught:
        select(["text.layer.{*}"], PATHS, "parallel.recompute")
    assert caught.value.nearest == "text.layers.{*}"
    assert "parallel.recompute" in str(caught.value)


@pytest.mark.parametrize(
    "bad", ["", " a", "a..b", ".a", "a.", "a.{1", "a.1}", "a.{5-2}", "a.{}", "a.{1,,2}", "a.{x y}"]
)
def test_malformed_patterns_are_refused(bad: str) -> None:
    with pytest.raises(TesseraError):
        matches(bad, "a")


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 400))
def test_ranges_mean_numbers(low: int, high: int, number: int) -> None:
    if low <= high:
        assert matches(f"l.{{{low}-{high}}}", f"l.{number}") == (low <= number <= high)
