"""Long work shows how far it is: one live line on a terminal, plain lines elsewhere, nothing when it is quick."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tessera.runtime import progress
from tessera.runtime.progress import WorkProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(progress, "time", fake)
    monkeypatch.delenv("RANK", raising=False)
    return fake


def on(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "__stderr__", stream)
    return stream


def work(clock: Clock, seconds: float, steps: int = 10) -> None:
    with WorkProgress("loading weights", steps * 10**9) as line:
        for _ in range(steps):
            clock.now += seconds / steps
            line.count(10**9)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What `work` said: threads that other tests have left may say something, too."""
    return [record.message for record in caplog.records if record.message.startswith("loading weights")]


def test_a_terminal_has_one_line_that_is_gone_at_the_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on(Terminal(), monkeypatch)
    work(clock, 20.0)
    text = screen.getvalue()
    assert "\n" not in text
    assert "loading weights: 5.0 GB of 10.0 GB, 500.0 MB/s, 10 s left" in text
    assert text.endswith("\r")
    assert text.rsplit("\r", 2)[1].strip() == ""


def test_work_of_few_large_portions_shows_that_it_goes_on(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on(Terminal(), monkeypatch)
    with WorkProgress("running a step", 2, "roles") as line:
        clock.now += 12
        line.count(0)
        assert "running a step: 0 of 2 roles so far, 12 s" in screen.getvalue()
        clock.now += 8
        line.count(1)
        assert "1 of 2 roles, 0.05/s, 20 s left" in screen.getvalue()


def test_a_log_has_a_line_every_ten_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = on(io.StringIO(), monkeypatch)
    with caplog.at_level(logging.INFO, logger="tessera"):
        work(clock, 35.0)
    assert screen.getvalue() == ""
    assert [line.count("s left") for line in lines(caplog)] == [1, 1, 1]


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_quick_work_and_other_ranks_say_nothing(
    stream: type[io.StringIO], clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = on(stream(), monkeypatch)
    with caplog.at_level(logging.INFO, logger="tessera"):
        work(clock, 0.5)
        monkeypatch.setenv("RANK", "3")
        work(clock, 100.0)
    assert screen.getvalue() == ""
    assert not lines(caplog)


def test_samples_are_counted_in_their_own_unit_and_nothing_done_is_no_error(clock: Clock) -> None:
    line = WorkProgress("evaluating", 500, "samples")
    assert line.line(clock.now) == "evaluating: 0 of 500 samples so far, 0 s"
    line.count(50)
    assert line.line(clock.now + 5) == "evaluating: 50 of 500 samples, 10/s, 45 s left"
