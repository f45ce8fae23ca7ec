"""The step line: what it says of memory and speed."""

from __future__ import annotations

from tessera.training.metrics import step_line


def test_memory_on_the_step_line_is_the_peak() -> None:
    row = {
        "step": 7,
        "loss": 1.5,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "data_wait": 0.0,
        "memory_gib": 21.0,  # what is held between steps
        "peak_memory_gib": 68.25,
        "step_seconds": 1.0,
        "mfu": 0.61,
    }
    line = step_line(row, 100)
    assert "mem 68.25 GiB" in line
    assert "21.0" not in line
