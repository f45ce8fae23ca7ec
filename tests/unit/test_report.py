"""The report: what it shows of one run and of several, what it shows while a run goes on, and who may read it."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tessera
from tessera.core.batch import Batch
from tessera.errors import TesseraError
from tessera.observe.report.boxes import find_boxes
from tessera.observe.report.charts import charts_of
from tessera.observe.report.history import History, read_sessions
from tessera.observe.report.live import LiveReport, Report
from tessera.observe.report.page import write_report
from tessera.observe.report.recorded import read_run
from tessera.observe.report.sampling import sample_metrics
from tessera.observe.report.watch import ReportServer
from tessera.runtime.files import write_jsonl
from tessera.runtime.process import Process
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
    assert 'http-equiv="refresh"' not in page  # it has ended


def test_every_curve_is_drawn_and_shows_its_values_below_the_pointer(page: str) -> None:
    titles = re.findall(r"<figcaption>([^<]+)", page)
    wanted = ["Loss (logarithmic)", "Learning rate", "Margin", "Reward, smoothed", "Tokens per second", "MFU"]
    assert [title for title in wanted if title not in titles] == []
    assert "Memory, GiB" in titles
    loss = page.split("<figcaption>Loss", 1)[1].split("</figure>", 1)[0]
    tips = re.findall(r'<g class="tip">.*?</g>', loss)
    assert 50 < len(tips) <= 101
    last = re.findall(r">([^<]+)</text>", tips[-1])
    assert last[0] == "step 200"
    assert last[1].startswith("each step  0.20837")  # exp(-200 / 90) + 0.1
    assert last[3].startswith("held-out  0.30837")


def test_text_of_prompts_and_answers_is_harmless_and_long_ones_are_folded(page: str) -> None:
    assert {"script", "iframe", "object", "form"} & Tags(page).found.keys() == set()
    assert "&lt;script&gt;" in page
    assert '<details class="long">' in page
    assert "2,000 characters" in page
    assert "default-src 'none'" in page


def test_images_are_large_enough_and_have_the_boxes_of_the_answer(page: str) -> None:
    assert "data:image/jpeg;base64" in page
    boxes = re.findall(r'<rect class="(said|wanted)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', page)
    assert boxes == [("wanted", "0.2600", "0.2500", "0.2400"), ("said", "0.2500", "0.2500", "0.2500")]


@pytest.mark.parametrize(
    ("text", "pixels", "wanted"),
    [
        ("<|object_ref_start|>cat<|object_ref_end|><|box_start|>(100,200),(300,400)<|box_end|>", False, "cat"),
        ("cat(100,200),(300,400)", False, ""),  # special tokens are gone
        ("<ref>cat</ref><box>[[100, 200, 300, 400]]</box>", False, "cat"),
        ('```json\n[{"bbox_2d": [100, 200, 300, 400], "label": "cat"}]\n```', False, "cat"),
        ('[{"label": "cat", "bbox_2d": [20.0, 100, 60, 200]}]', True, "cat"),
    ],
)
def test_boxes_are_found_in_the_words_of_each_family(text: str, pixels: bool, wanted: str) -> None:
    (box,) = find_boxes(text, (200, 500), pixels)
    assert (box.left, box.top, box.right, box.bottom, box.label) == (0.1, 0.2, 0.3, 0.4, wanted)


def test_what_is_no_box_is_passed_over() -> None:
    assert find_boxes("f(1,2) = (3,4)", (10, 10)) == []
    assert find_boxes("(300,400),(100,200)", (10, 10)) == []  # inside out
    assert find_boxes("<box>[[1, 2, 3]]</box>" + '{"bbox_2d": [' * 5000, (10, 10)) == []
    (beyond,) = find_boxes("(900,900),(5000,5000)", (10, 10))
    assert (beyond.right, beyond.bottom) == (1.0, 1.0)
    assert len(find_boxes("(1,1),(2,2) " * 1000, (10, 10))) == 50


def test_several_runs_stand_side_by_side(run: Path, tmp_path: Path) -> None:
    other = write_recorded_run(tmp_path / "other" / "one", lr=3e-4, how="finished")
    page = tessera.report(run, other, out=tmp_path / "new" / "compare.html").read_text()
    assert f"{run.parent.name}/one" in page  # both are called one: their folders tell them apart
    assert "other/one" in page
    assert page.count('class="run-1"') > 5
    assert "<code>optim.lr</code>" in page  # what differs
    assert "<code>train.seed</code>" not in page
    answers = page.split("Held-out answers")[1]
    assert answers.index("2 + 2?") < answers.index("Where?")  # where answers differ comes first
    with pytest.raises(TesseraError, match="belongs to none of them"):
        tessera.report(run, other)
    with pytest.raises(TesseraError, match="is a folder"):
        tessera.report(run, other, out=tmp_path)
    with pytest.raises(TesseraError, match="not a run"):
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


@pytest.mark.slow
def test_the_report_of_a_run_at_work_is_drawn_by_another_process_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run")
    (folder / "history.jsonl").unlink()
    (folder / "answers.jsonl").unlink()
    live = LiveReport(first_s=0.0, every_s=3600.0)
    live.on_start(trainer(folder))
    began = time.monotonic()
    for step in (1, 2, 3):
        live.on_step_end(trainer(folder, step), SimpleNamespace(step=step))  # type: ignore[arg-type]
    assert time.monotonic() - began < 1.0  # a step waits for nothing
    assert live._drawing is not None
    assert live._drawing.wait(120) == 0
    drawn = (folder / "report.html").read_text()
    assert "running" in drawn
    assert 'http-equiv="refresh"' in drawn
    assert [row.how for row in read_sessions(folder)] == ["running"]
    Report(live).on_end(trainer(folder, 3))
    assert "finished" in (folder / "report.html").read_text()
    assert [(row.how, row.last_step) for row in read_sessions(folder)] == [("finished", 3)]
    assert [path.name for path in folder.glob("report.html*")] == ["report.html"]


def test_a_run_that_fails_draws_why_and_never_hides_its_error(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run")
    live = LiveReport()
    live.on_start(trainer(folder))
    live.on_error(trainer(folder, 7), TesseraError("no <disk> left"))
    assert "no &lt;disk&gt; left" in (folder / "report.html").read_text()
    again = LiveReport()
    again.on_start(trainer(folder))
    (folder / "config.yaml").unlink()
    again.on_error(trainer(folder, 8), KeyboardInterrupt())  # the page cannot be drawn: that is only logged


def test_sessions_tell_a_kill_from_a_run_at_work_and_from_one_that_is_silent(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.started(0, "CPU")
    history.alive(5)
    history.started(4, "CPU")
    assert [one.how for one in read_sessions(tmp_path)] == ["killed", "running"]
    path = tmp_path / "history.jsonl"
    gone = {**Process.this().dump(), "started": "1"}
    elsewhere = {**gone, "realm": "another machine"}
    start = {"kind": "start", "step": 9, "time": "2026-01-01T00:00:00+00:00"}
    for process, how in ((gone, "killed"), (elsewhere, "silent")):
        path.write_text(json.dumps({**start, "process": process}) + "\n")
        assert [one.how for one in read_sessions(tmp_path)] == [how]


# ---------------------------------------------------------------------------------------------- in a browser


@pytest.fixture
def server(run: Path) -> Iterator[ReportServer]:
    with ReportServer([run]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ReportServer, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, str]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_watched_report_is_served_to_this_machine_alone(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, page = ask(server)
    assert status == 200
    assert "<h1>one</h1>" in page
    assert ask(server, host="localhost:1234")[0] == 200
    for foreign in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1:80", "", "[::1"):
        assert ask(server, host=foreign or " ")[0] == 403, foreign
    for path in ("/report.html", "/../config.yaml", "/%2e%2e/config.yaml", "//etc/passwd", "/config.yaml"):
        status, text = ask(server, path)
        assert status in (403, 404), path
        assert "global_batch" not in text
    assert ask(server, method="HEAD") == (200, "")
    assert ask(server, method="POST")[0] == 501


def test_a_page_that_is_watched_draws_itself_anew_until_it_is_told_to_stand_still(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run")
    History(folder).started(0, "CPU")
    with ReportServer([folder]) as server:
        assert 'http-equiv="refresh" content="10"' in server.page(still=False)
        assert 'http-equiv="refresh"' not in server.page(still=True)
    with ReportServer([folder, folder]) as server:
        assert "2 runs side by side" in server.page(still=False)


def test_a_port_in_use_is_explained(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TesseraError, match="it is in use"):
            ReportServer([run], taken.getsockname()[1])


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(TesseraError, match="cannot be written: Read-only"):
        tessera.report(run)


def test_nothing_is_written_through_a_link(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    os.symlink(precious, tmp_path / "out.html")
    tessera.report(run, out=tmp_path / "out.html")
    assert precious.read_text() == "mine"


# ---------------------------------------------------------------------------------------------- in a notebook


def test_a_run_shows_its_curves_and_figures_in_a_notebook(run: Path, tmp_path: Path) -> None:
    shown = tessera.Run(run, None)
    plot = shown.plot()
    markup = plot._repr_html_()
    assert Tags(markup).found["svg"] > 8
    assert "body{" not in markup  # the page that it stands in keeps its own style
    assert all(".tessera-output" in rule for rule in re.findall(r"[}>]([^{}<>@]+)\{", markup.split("</style>")[0]))
    assert len(shown.plot("loss", "eval_loss", "mfu").charts) == 3
    assert plot.save(tmp_path / "plot.html").read_text().startswith("<!doctype html>")
    with pytest.raises(TesseraError, match="did you mean: margin"):
        shown.plot("margins")
    assert repr(shown) == f"Run({run}: 200 steps, no checkpoint)"
    assert "NVIDIA H200" in shown._repr_html_()


def test_plans_and_batches_are_short_and_become_tables() -> None:
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "data": {"train": [{"path": "x"}]}}
    plan = tessera.plan({**recipe, "train": {"steps": 1, "global_batch": 8}}, world=4)
    assert len(repr(plan)) < 120
    assert "4 replicated" in plan._repr_html_() or "sharded" in plan._repr_html_()
    batch = Batch({"tokens": torch.zeros(3, 4), "<b>": torch.zeros(1)})
    assert repr(batch) == "Batch(tokens [3, 4], <b> [1])"
    assert "<td>&lt;b&gt;</td>" in batch._repr_html_()


def test_a_long_record_is_sampled_and_keeps_its_peaks_its_evaluations_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = {step: 1.0 + step / 1e4 for step in range(1, 3002)} | {1234: 50.0, 2222: float("nan")}
    rows = [{"kind": "train", "step": step, "loss": loss} for step, loss in losses.items()]
    rows += [{"kind": "eval", "step": step, "eval_loss": 1.0} for step in range(500, 3001, 500)]
    write_jsonl(path, sorted(rows, key=lambda row: int(str(row["step"]))))
    with path.open("a") as file:
        file.write('{"kind": "train", broken}\n{"kind": "train", "step": 3002, "lo')
    found = sample_metrics(path, most=100)
    steps = [row["step"] for row in found.rows if row["kind"] == "train"]
    assert 90 <= len(steps) <= 130
    assert {later - earlier for earlier, later in pairwise(steps[:-1])} == {found.every}
    assert steps[-1] == 3001
    assert [row["step"] for row in found.rows if row["kind"] == "eval"] == [500, 1000, 1500, 2000, 2500, 3000]
    peaks = {row["step"]: row["loss"] for row in found.peaks}
    assert peaks[1234] == 50.0
    assert 2222 in peaks
    whole = sample_metrics(path)
    assert (len(whole.rows), whole.every, len(whole.peaks)) == (3001 + 6, 1, 0)
    (tmp_path / "config.yaml").write_text("name: long\n", encoding="utf-8")
    run = replace(read_run(tmp_path), rows=found.rows, peaks=found.peaks, every=found.every)
    assert (1234, 50.0) in run.with_peaks("loss")
    assert (1234, 50.0) not in run.points("loss")
    assert f"one step in {found.every}, and peaks" in charts_of(run)[0]
