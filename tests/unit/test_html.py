"""Parts of pages: what comes from data is escaped, and charts draw what they are given."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from tessera.runtime import html


class Tags(HTMLParser):
    """Count tags, and check that each one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


EVIL = '<script>alert("x")</script>\u202e'


def test_text_from_data_stays_text() -> None:
    parts = [
        html.section(EVIL, ""),
        html.facts([(EVIL, EVIL)]),
        html.table([EVIL], [[html.escape(EVIL)]], chosen=[0]),
        html.line_chart(EVIL, [html.Series(EVIL, [(1, 1), (2, 2)])]),
        html.bar_chart(EVIL, EVIL, [(1, EVIL)], labels=[(0, EVIL)], lines=[(0.5, "mark", EVIL)]),
    ]
    page = html.page(EVIL, parts)
    assert "script" not in Tags(page).counts
    assert "\u202e" not in page
    assert "default-src 'none'" in page


def test_a_line_chart_leaves_out_what_it_cannot_draw_and_keeps_peaks() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[7_777] = (7_777.0, 5.0)
    points[3] = (3.0, math.nan)
    chart = html.line_chart("loss", [html.Series("loss", points)], log_scale=True)
    assert "(1 non-finite values left out)" in chart
    drawn = re.search(r'points="([^"]+)"', chart)
    assert drawn is not None
    heights = [float(one.split(",")[1]) for one in drawn[1].split()]
    assert len(heights) <= 2 * (html.COLUMNS + 1)
    assert min(heights) == html._MARGIN_TOP  # the peak reaches the top
    assert Tags(chart).counts["line"] == 5  # of the grid
    assert "nothing recorded" in html.line_chart("empty", [html.Series("loss", [(0.0, math.inf)])])


@pytest.mark.parametrize(
    ("last", "ticks"),
    [
        (1, [0, 1]),
        (5, [0, 1, 2, 3, 4, 5]),
        (7, [0, 2, 4, 6]),
        (48, [0, 10, 20, 30, 40]),
        (1000, [0, 200, 400, 600, 800, 1000]),
    ],
)
def test_an_axis_of_steps_has_whole_evenly_spaced_ticks_in_their_places(last: int, ticks: list[int]) -> None:
    chart = html.line_chart("Loss", [html.Series("loss", [(step, step) for step in range(1, last + 1)])])
    labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d,]+)</text>', chart)
    assert [int(text.replace(",", "")) for _, text in labels] == ticks
    width = html._WIDTH - html._MARGIN_LEFT - html._MARGIN_RIGHT
    for (x, _), tick in zip(labels, ticks, strict=True):
        assert float(x) == pytest.approx(html._MARGIN_LEFT + width * tick / last, abs=0.06)


def test_bars_have_heights_in_proportion_and_the_smallest_is_seen() -> None:
    chart = html.bar_chart("lengths", "tokens", [(100_000, "a"), (50_000, "b"), (1, "c"), (0, "d")])
    heights = [float(one) for one in re.findall(r'height="([\d.]+)"', chart)]
    assert heights == [120.0, 60.0, 1.5, 0.0]
