"""The step line: what it says of loss, memory and speed."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from tessera.runtime import log
from tessera.training.console import clock, mean_of, plain, step_fields, styled

ROW: dict[str, Any] = {
    "step": 250,
    "epoch": 1.2,
    "loss": 0.7216,
    "lr": 1e-5,
    "grad_norm": 0.9123,
    "tokens_per_s": 5712.0,
    "images_per_s": 345.0,
    "data_wait": 0.001,
    "memory_gib": 21.0,  # what is held between steps
    "peak_memory_gib": 42.25,
    "step_seconds": 0.085,
    "mfu": 0.412,
}


def line(row: dict[str, Any], steps: int = 1500, metrics: tuple[str, ...] = ()) -> str:
    return plain(step_fields(row, steps, metrics))


def test_the_step_line_says_what_matters() -> None:
    said = "step  250/1500  epoch 1.2  loss 0.7216  lr 1.0e-5  grad 0.91  5.7k tok/s  mfu 41%  42 GiB  eta 1m46"
    assert line(ROW) == said


def test_memory_on_the_step_line_is_the_peak() -> None:
    assert "68 GiB" in line({**ROW, "peak_memory_gib": 68.25})
    assert "21 GiB" not in line(ROW)


PAIRS = {"accuracy": 0.75, "margin": 0.31, "reward_chosen": 0.2, "reward_rejected": -0.11}


@pytest.mark.parametrize("troubled", [False, True])
def test_the_first_metrics_of_the_objective_are_on_the_line(troubled: bool) -> None:
    trouble = {"skipped_steps": 3, "data_wait": 0.4, "balance": 1.8} if troubled else {}
    row = {**ROW, **PAIRS, **trouble, "step": 1_250_000, "step_seconds": 10.0}
    text = line(row, 9_999_999, tuple(PAIRS))
    assert "accuracy 0.75  margin 0.31  lr" in text
    assert "loss 0.7216" in text
    assert ("skipped 3" in text) == troubled


def test_every_loss_is_on_the_line_and_others_fill_it_up() -> None:
    row = {**ROW, **PAIRS, "text_loss": 0.5, "code_loss": 0.25, "depth_loss": 0.125}
    assert "text_loss 0.5  code_loss 0.25  depth_loss 0.125  lr" in line(row, metrics=(*PAIRS, *list(row)[-3:]))
    assert "text_loss 0.5  accuracy 0.75  lr" in line(row, metrics=(*PAIRS, "text_loss"))


def test_waiting_for_data_is_said_when_it_matters() -> None:
    assert "wait" not in line(ROW)
    assert "wait 26%" in line({**ROW, "data_wait": 0.26})


def test_the_loss_of_a_line_is_the_mean_since_the_last_line_without_steps_that_were_skipped() -> None:
    rows = [{"loss": 1.0}, {"loss": 3.0}, {"loss": float("nan"), "skipped": True}, {"loss": 100.0, "skipped": True}]
    assert mean_of(rows, ["loss"]) == {"loss": 2.0, "skipped_steps": 2}


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0s"), (59.4, "59s"), (106, "1m46"), (3600, "1h00"), (7325, "2h02"), (10**6, "11d13h")]
)
def test_the_time_left_is_short(seconds: float, said: str) -> None:
    assert clock(seconds) == said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_colour_is_for_terminals_alone(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    fields = step_fields(ROW, 1500)
    with log.on_screen():
        log.logger().info("%s", plain(fields), extra={"styled": styled(fields)})
        log.logger().warning("look out")
        monkeypatch.setenv("NO_COLOR", "1")
        log.logger().warning("look out")
    first, second, third = stream.getvalue().splitlines()
    assert third == "look out"
    if stream.isatty():
        assert "\x1b[1m0.7216\x1b[0m" in first
        assert second == "\x1b[33mlook out\x1b[0m"
    else:
        assert first == plain(fields)
        assert second == "look out"
    assert logging.getLogger("tessera").handlers == []
