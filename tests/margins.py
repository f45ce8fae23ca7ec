"""A plugin that tells how near each numeric comparison came to its limit: `make margins`.

A limit that is met with little to spare on one machine is missed on the next, which adds in another order. So every
comparison is recorded as the share of its limit that it took (1.0 would fail): `torch.testing.assert_close` and
`pytest.approx` by measuring them again, and plain `assert error < 1e-5` by what pytest knows of the values. The places
are printed in order, worst first; `--margins FILE` writes all of them as lines of JSON.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
BELOW = re.compile(rf"^\(?(?:tensor\()?({NUMBER})\)? <=? ({NUMBER})\)?(?:\s|$)")
SHOWN = 40

# Modules with assertions that are neither tests nor conftest: pytest looks into those only if it is asked to.
pytest.register_assert_rewrite("parity", "answers", "tests.dist.layouts", "tests.close")


class Margins:
    """The largest share of a limit, by the place in the source that compared."""

    def __init__(self) -> None:
        self.worst: dict[str, tuple[float, str, str]] = {}
        self.test = ""

    def note(self, place: str, error: float, limit: float, what: str = "") -> None:
        if limit > 0 and math.isfinite(error):
            share = error / limit
            if share > self.worst.get(place, (-1.0, "", ""))[0]:
                self.worst[place] = (share, self.test, what or f"{error:.2g} of {limit:.2g}")


def place_of_caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/tests/" in path and not path.endswith("margins.py"):
            return f"{path[path.rindex('/tests/') + 1 :]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield float(value)
    elif hasattr(value, "tolist"):
        yield from numbers(value.tolist())


def watch(patch: pytest.MonkeyPatch, margins: Margins) -> None:
    plain_close = torch.testing.assert_close

    @functools.wraps(plain_close)
    def close(actual: Any, expected: Any, *args: Any, **options: Any) -> None:
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and expected.is_floating_point():
            rtol, atol = options.get("rtol"), options.get("atol")
            if rtol is None:
                rtol, atol = {torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}.get(
                    expected.dtype, (1e-7, 1e-7)
                )
            if actual.shape == expected.shape and actual.numel():
                error = (actual.detach().double() - expected.detach().double()).abs()
                share = float((error / (atol + rtol * expected.detach().double().abs())).max())
                margins.note(place_of_caller(), share, 1.0, f"{float(error.max()):.2g}, rtol {rtol:g} atol {atol:g}")
        plain_close(actual, expected, *args, **options)

    patch.setattr(torch.testing, "assert_close", close)

    def watched(kind: Any) -> Any:
        plain = kind.__eq__

        @functools.wraps(plain)
        def equal(self: Any, actual: Any) -> Any:
            try:
                actual_numbers, wanted = list(numbers(actual)), list(numbers(self.expected))
                if len(actual_numbers) == len(wanted):
                    for number, other in zip(actual_numbers, wanted, strict=True):
                        limit = pytest.approx(other, rel=self.rel, abs=self.abs).tolerance
                        margins.note(place_of_caller(), abs(number - other), limit)
            except (TypeError, ValueError):
                pass
            return plain(self, actual)

        return equal

    for kind in {type(pytest.approx(example)) for example in (1.0, [1.0], {"a": 1.0})}:
        patch.setattr(kind, "__eq__", watched(kind))


class Plugin:
    def __init__(self, path: str | None) -> None:
        self.margins, self.path, self.patch = Margins(), path, pytest.MonkeyPatch()
        watch(self.patch, self.margins)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.margins.test = nodeid

    def pytest_assertion_pass(self, item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
        match = BELOW.match(expl.replace("\n", " "))
        if match and any(word in orig.lower() for word in ("e-", "tolerance", "limit")):
            place = place_of_caller()
            self.margins.note(place, float(match[1]), float(match[2]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = sorted(((share, place, *rest) for place, (share, *rest) in self.margins.worst.items()), reverse=True)
        if self.path:
            lines = (json.dumps(dict(zip(("share", "place", "test", "what"), row, strict=True))) for row in rows)
            Path(self.path).write_text("".join(line + "\n" for line in lines))
        terminalreporter.section("margins: the share of its limit that each comparison took")
        for share, place, test, what in rows[:SHOWN]:
            terminalreporter.line(f"{share:8.1%}  {place}  {what}  {test.split('::', 1)[-1]}")

    def pytest_unconfigure(self) -> None:
        self.patch.undo()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--margins", default=None, help="write every comparison's share of its limit to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(config.getoption("--margins")), "margins-plugin")
