"""Reports of records with odd content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tessera.inference.answer_images import with_copies
from tessera.observe.report.page import write_report
from tessera.runtime.files import read_jsonl, write_jsonl


def write_run(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("name: odd\n", encoding="utf-8")
    lines = [json.dumps({"kind": "train", "step": number, "loss": 1.0, **row}) for number, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_metrics_that_are_no_finite_numbers_are_drawn(tmp_path: Path, value: float) -> None:
    run = write_run(tmp_path / "run", *[{"loss": value, "accuracy": value, "margin": value, "grad_norm": value}] * 3)
    assert "odd" in write_report(run).read_text(encoding="utf-8")


def test_a_step_that_no_run_can_have_is_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"step": 10**400}, {"step": 3})
    assert "<b>3</b>" in write_report(run).read_text(encoding="utf-8")


def test_a_file_that_is_named_like_answers_of_no_step_is_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {})
    (run / "answers-step-9-copy.jsonl").write_text("{}\n", encoding="utf-8")
    assert write_report(run).is_file()


def answer(*images: str, **more: Any) -> dict[str, Any]:
    return {"id": "0", "question": "?", "expected": "a", "answer": "b", "correct": False, "images": [*images], **more}


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_images_outside_of_a_run_are_not_embedded(tmp_path: Path, suffix: str) -> None:
    """The run may be somebody else's, and the page may be sent to them."""
    secret = tmp_path / f"secret.{suffix}"
    Image.new("RGB", (80, 80)).save(secret)
    run = write_run(tmp_path / "run", {})
    (run / f"link.{suffix}").symlink_to(secret)
    outside = [str(secret), f"../secret.{suffix}", f"link.{suffix}", f"a\0.{suffix}", "x" * 5000 + f".{suffix}"]
    copies = [{"file": name, "width": 80, "height": 80} for name in outside]
    rows = [answer(*outside), answer(*["gone.png"] * len(outside), shown=copies), answer("a", shown=[7, {"file": 1}])]
    write_jsonl(run / "answers.jsonl", rows)
    write_jsonl(run / "previews.jsonl", [{"step": 1, "file": name} for name in outside])
    assert "data:image" not in write_report(run).read_text(encoding="utf-8")
    Image.new("RGB", (80, 80)).save(run / f"inside.{suffix}")
    write_jsonl(run / "answers.jsonl", [answer(f"inside.{suffix}")])
    assert "data:image" in write_report(run).read_text(encoding="utf-8")


def test_the_images_of_answers_are_kept_small_in_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {})
    Image.new("RGB", (1000, 500), (10, 200, 30)).save(tmp_path / "photo.png")
    row = answer(str(tmp_path / "photo.png"), "a\0b", "a.png in b.tar") | {"answer": "[[0, 0, 500, 1000]]"}
    write_jsonl(run / "answers.jsonl", with_copies(run, [row]))
    (row,) = read_jsonl(run / "answers.jsonl")
    assert [copy and (copy["width"], copy["height"]) for copy in row["shown"]] == [(1000, 500), None, None]
    (copy,) = (run / "answer_images").iterdir()
    with Image.open(copy) as image:
        assert image.size == (420, 210)
    (tmp_path / "photo.png").unlink()
    assert "data:image/jpeg" in write_report(run).read_text(encoding="utf-8")
