"""The report: what it shows of a run, also while the run goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tessera
from tessera.core.batch import Batch
from tessera.errors import TesseraError
from tessera.observe.report import recorded
from tessera.observe.report.callbacks import Report, SessionHistory
from tessera.observe.report.charts import charts_of
from tessera.observe.report.history import History, read_sessions
from tessera.observe.report.page import write_report
from tessera.runtime.files import write_jsonl
from tessera.runtime.process import Process
from tests.errors import raises
from tests.toys.recorded_run import write_recorded_run
from tests.unit.test_html import Tags


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("runs") / "one", how="failed", reason="out of <memory>")


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return tessera.report(run).read_text()


def test_a_report_says_when_where_and_how_a_run_went(page: str) -> None:
    for fact in ("2026-03-01", "1 h 30 min", "16 x NVIDIA H200 on 2 machines", "torch 2.11.0", "41.0%", "61.20 GiB"):
        assert fact in page, fact
    assert "failed" in page
    assert "out of &lt;memory&gt;" in page


def test_every_curve_is_drawn_and_shows_its_values_below_the_pointer(page: str) -> None:
    titles = re.findall(r"<figcaption>([^<]+)", page)
    wanted = ["Loss (logarithmic)", "Learning rate", "Margin", "Reward chosen", "Tokens per second", "MFU"]
    assert [title for title in wanted if title not in titles] == []
    assert "Memory, GiB" in titles
    loss = page.split("<figcaption>Loss", 1)[1].split("</figure>", 1)[0]
    tips = re.findall(r"<rect[^>]*><title>(.*?)</title>", loss, re.DOTALL)
    assert 50 < len(tips) <= 101
    last = tips[-1].splitlines()
    assert last[0] == "step 200"
    assert last[1].startswith("each step  0.20837")  # exp(-200 / 90) + 0.1
    assert last[3].startswith("held-out  0.30837")


def test_text_of_prompts_and_answers_is_harmless_and_long_ones_are_folded(page: str) -> None:
    assert {"script", "iframe", "object", "form"} & Tags(page).counts.keys() == set()
    assert "&lt;script&gt;" in page
    assert '<details class="long">' in page
    assert "2,000 characters" in page
    assert "default-src 'none'" in page


def test_images_are_embedded(page: str) -> None:
    assert "data:image/jpeg;base64" in page


def test_a_folder_that_is_no_run_and_a_file_that_is_a_folder_are_refused(run: Path, tmp_path: Path) -> None:
    assert tessera.report(run, out=tmp_path / "new" / "page.html").is_file()
    with raises("output.is-folder", "--out"):
        tessera.report(run, out=tmp_path)
    with raises("run.not-a-run"):
        tessera.report(tmp_path)


def test_a_damaged_record_costs_its_line_and_not_the_page(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 201, "loss": "high", "mfu": null}\nnonsense\n')
    (folder / "answers.jsonl").write_text('{"answer": 5, "images": "x"}\n{"images": ["/dev/zero", "gone.png"]}\n')
    (folder / "history.jsonl").write_text('{"kind": "end"}\n{"kind": "start", "step": 1, "time": "noon"}\n')
    assert "201" in write_report(folder).read_text()


# ---------------------------------------------------------------------------------------------- while a run goes on


def test_drawing_needs_no_torch() -> None:
    """Importing it would take ten times as long as drawing, once a minute beside a run."""
    check = "import sys; import tessera.observe.report.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


def trainer(folder: Path, step: int = 0) -> Any:
    world = SimpleNamespace(is_main=True, size=1, device=torch.device("cpu"))
    return SimpleNamespace(config=SimpleNamespace(folder=folder), world=world, step=step, stop_reason=None)


def test_the_history_of_a_run_at_work_ends_with_the_run(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run")
    (folder / "history.jsonl").unlink()
    history = SessionHistory()
    history.on_start(trainer(folder))
    assert [row.how for row in read_sessions(folder)] == ["running"]
    assert "running" in tessera.report(folder).read_text()
    Report(history).on_end(trainer(folder, 3))
    assert "finished" in (folder / "report.html").read_text()
    assert [(row.how, row.last_step) for row in read_sessions(folder)] == [("finished", 3)]
    assert [path.name for path in folder.glob("report.html*")] == ["report.html"]


def test_a_run_that_fails_draws_why_and_never_hides_its_error(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run")
    live = SessionHistory()
    live.on_start(trainer(folder))
    live.on_error(trainer(folder, 7), TesseraError("no <disk> left"))
    assert "no &lt;disk&gt; left" in (folder / "report.html").read_text()
    again = SessionHistory()
    again.on_start(trainer(folder))
    (folder / "config.yaml").unlink()
    again.on_error(trainer(folder, 8), KeyboardInterrupt())  # the page cannot be drawn: that is only logged


def test_sessions_tell_a_kill_from_a_run_at_work_and_from_one_that_is_silent(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.started(0, "CPU")
    history.alive(5)
    history.started(4, "CPU")
    assert [session.how for session in read_sessions(tmp_path)] == ["killed", "running"]
    path = tmp_path / "history.jsonl"
    gone = {**Process.this().dump(), "started": "1"}
    elsewhere = {**gone, "realm": "another machine"}
    start = {"kind": "start", "step": 9, "time": "2026-01-01T00:00:00+00:00"}
    for process, how in ((gone, "killed"), (elsewhere, "silent")):
        path.write_text(json.dumps({**start, "process": process}) + "\n")
        assert [session.how for session in read_sessions(tmp_path)] == [how]


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("os.replace", refuse)
    with raises("output.not-writable", "Read-only"):
        tessera.report(run)


def test_nothing_is_written_through_a_link(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    os.symlink(precious, tmp_path / "out.html")
    tessera.report(run, out=tmp_path / "out.html")
    assert precious.read_text() == "mine"


# ---------------------------------------------------------------------------------------------- in a notebook


def test_a_run_shows_its_curves_and_figures_in_a_notebook(run: Path, tmp_path: Path) -> None:
    result = tessera.Run(run, None)
    plot = result.plot()
    markup = plot._repr_html_()
    assert Tags(markup).counts["svg"] > 8
    assert "body{" not in markup  # the page that it stands in keeps its own style
    assert all(".tessera-output" in rule for rule in re.findall(r"[}>]([^{}<>@]+)\{", markup.split("</style>")[0]))
    assert repr(result) == f"Run({run}: 200 steps, no checkpoint)"
    assert "NVIDIA H200" in result._repr_html_()


def test_plans_and_batches_are_short() -> None:
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "data": {"train": [{"path": "x"}]}}
    plan = tessera.plan({**recipe, "train": {"steps": 1, "global_batch": 8}}, world=4)
    assert len(repr(plan)) < 120
    batch = Batch({"tokens": torch.zeros(3, 4), "<b>": torch.zeros(1)})
    assert repr(batch) == "Batch(tokens [3, 4], <b> [1])"


def test_of_a_long_record_one_step_in_some_is_drawn_with_all_evaluations_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "MOST_ROWS", 100)
    rows = [{"kind": "train", "step": step, "loss": 1.0 + step / 1e4} for step in range(1, 3002)]
    rows += [{"kind": "eval", "step": step, "eval_loss": 1.0} for step in range(500, 3001, 500)]
    write_jsonl(tmp_path / "metrics.jsonl", sorted(rows, key=lambda row: int(str(row["step"]))))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", broken}\n{"kind": "train", "step": 3002, "lo')
    (tmp_path / "config.yaml").write_text("name: long\n", encoding="utf-8")
    run = recorded.read_run(tmp_path)
    steps = [row["step"] for row in run.train_rows]
    assert 90 <= len(steps) <= 200
    assert {later - earlier for earlier, later in pairwise(steps[:-1])} == {run.every}
    assert steps[-1] == 3001
    assert [step for step, _ in run.held_out("loss")] == [500, 1000, 1500, 2000, 2500, 3000]
    assert f"one step in {run.every}" in charts_of(run)[0]
