"""The report in a real browser: it is drawn, answers to the pointer, and runs nothing that a prompt says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tessera
from tessera.evaluation.evaluate import evaluate
from tessera.evaluation.page import write_evaluation_page
from tessera.runtime.files import read_jsonl
from tests.toys.browser import browser, find_browser
from tests.toys.chat_service import write_model
from tests.toys.recorded_run import write_recorded_run
from tests.unit.test_evaluation import write_table

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason="there is no Chromium here")]
LOOK = os.environ.get("TESSERA_SCREENSHOTS")  # a folder to keep screenshots in, for eyes

TIP = "document.elementFromPoint({x}, {y}).querySelector('title')?.textContent ?? ''"


def test_the_report_works_in_a_browser(tmp_path: Path) -> None:
    address = tessera.report(write_recorded_run(tmp_path / "run", how="finished")).as_uri()
    pictures = Path(LOOK or tmp_path)
    with browser(tmp_path / "profile") as page:
        page.open(address, height=2600)
        page.screenshot(pictures / "report.png")
        assert page.value("document.title") == "run · Tessera"
        assert page.value("window.evil") is None
        assert page.value("document.scripts.length") == 0
        assert page.value("[...document.images].every(image => image.naturalWidth > 100)")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")  # nothing sticks out
        box = "document.querySelector('figure svg').getBoundingClientRect()"
        x, top = page.value(f"{box}.left"), page.value(f"{box}.top")
        wide, high = page.value(f"{box}.width"), page.value(f"{box}.height")
        tip = page.value(TIP.format(x=x + wide * 0.5, y=top + high * 0.5))
        assert "step " in tip
        assert "each step" in tip
        assert page.value("document.querySelector('details.long').open") is False
        page.value("document.querySelector('details.long summary').click()")
        assert page.value("document.querySelector('details.long').innerText.length > 1900")
        page.open(address, width=400, height=2000)
        page.screenshot(pictures / "narrow.png")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_buttons_of_an_evaluation_select_answers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=4.0)
    out = tmp_path / "out"
    (result,) = evaluate(model, data=write_table(tmp_path, 12), max_new_tokens=2, device="cpu", out=out).results
    rows = list(read_jsonl(result.answers))
    for row in rows[:5]:
        row["values"] = {"relaxed_accuracy": 1.0}
    result.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    visible = "[...document.querySelectorAll('.answer')].filter(each => each.offsetParent).length"
    with browser(tmp_path / "profile") as page:
        page.open(write_evaluation_page(out).as_uri(), height=1600)
        page.screenshot(Path(LOOK or tmp_path) / "evaluation.png")
        assert page.value("document.scripts.length") == 0
        assert page.value("[...document.images].every(image => image.naturalWidth > 10)")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.value(visible) == 12
        for name, count in (("wrong", 7), ("right", 5), ("all", 12)):
            page.value(f"document.querySelector('label[for=pick-0-{name}]').click()")
            assert page.value(visible) == count


def test_a_notebook_cell_works_in_a_browser(tmp_path: Path) -> None:
    run = tessera.Run(write_recorded_run(tmp_path / "run", how="finished"), None)
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><body><h1>mine</h1>{run._repr_html_()}{run.plot()._repr_html_()}")
    pictures = Path(LOOK or tmp_path)
    with browser(tmp_path / "profile") as page:
        page.open(cell.as_uri(), height=1400)
        page.screenshot(pictures / "cell.png")
        assert page.value("getComputedStyle(document.querySelector('h1')).fontSize") == "32px"  # theirs is untouched
        assert page.value("getComputedStyle(document.querySelector('polyline')).fill") == "none"  # ours is styled
