"""Print the progress of sampling."""

from __future__ import annotations

import sys
import time

from tessera.diffusion.sampling.pipeline import OnStep


def progress() -> OnStep:
    """Return a callback that prints a line after each step, with the time per step."""
    last: list[float] = []

    def show(finished: int, samples: int, step: int, steps: int) -> None:
        now = time.monotonic()
        # The first step is not timed: it includes the loading of weights.
        rate = f", {now - last[-1]:.2f} s a step" if last and step > 1 else ""
        last[:] = [now]
        end = "\r" if sys.stderr.isatty() and step < steps else "\n"
        first = f"sample {finished + 1} of {samples}, " if samples > 1 else ""
        print(f"{first}step {step} of {steps}{rate}", end=end, file=sys.stderr, flush=True)

    return show
