"""What every test stands on, the order in which tests run, and where their time goes."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.config.trust import STATE_VARIABLE
from tessera.data.cache import CACHE_VARIABLE

# Files with several ranks take longest; begun last, one of them would leave the other worker with nothing to do.
FOLDERS = ("dist", "contract", "compat", "unit")
SLOWEST = 8
SHARED_RANKS = ("dist", "contract")  # other folders train with programs of other systems, which have global state
NOBODY = "http://127.0.0.1:9"  # a port that refuses at once
STARTS_RANKS = ("tests.dist.", "family_layouts")  # in files of `SHARED_RANKS` that train on several ranks


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of tests leave no note in the home of whoever runs them, and ask no hub for anything; ranks and commands
    that they start inherit it."""
    ours = {
        STATE_VARIABLE: str(tmp_path_factory.mktemp("state")),
        CACHE_VARIABLE: str(tmp_path_factory.mktemp("cache")),
        "HF_ENDPOINT": NOBODY,
        "MODELSCOPE_ENDPOINT": NOBODY,
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Typer builds all commands from their functions at each call, which takes 70 ms. A user calls once, tests call
    hundreds of times in one process."""
    from typer import main

    build = main.get_command
    main.get_command = functools.cache(build)
    yield
    main.get_command = build


@pytest.fixture(scope="module", autouse=True)
def checked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks serve the tests of several files of a worker, as long as they are fit for more."""
    yield
    if "tests.dist.spawn" in sys.modules:  # it imports torch, which some workers never need
        spawn = sys.modules["tests.dist.spawn"]
        spawn.check_ranks() if request.path.parent.name in SHARED_RANKS else spawn.end_ranks()


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker of a whole run begin with other files: to prepare the asserts of all of them for their messages
    takes 9 s, and what one worker has prepared the others only read."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        # torch obeys and oneDNN does not: with units that one uses and the other avoids, attention in bf16 is refused.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    gc.disable()
    if "not slow" in config.getoption("markexpr") and importlib.util.find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile("few", max_examples=30)
        settings.load_profile("few")
    here = Path(__file__).parent
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number and [Path(one).resolve() for one in config.args] == [here]:
        files = sorted(str(one) for one in here.rglob("test_*.py"))
        first = len(files) * int(number) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args[:] = files[first:] + files[:first]


@functools.cache
def scope_of(path: str) -> str:
    """Return the scope whose files one worker runs: all files that share ranks, else the file alone.

    A fork server and ranks of three world sizes take 15 s of CPU time until they have imported what they need and torch
    has derived the placements of every operation. One worker pays that, not each.
    """
    file = Path(__file__).parent.parent / path
    if file.parent.name not in SHARED_RANKS:
        return path
    shared = file.parent.name == "dist" or any(word in file.read_text(encoding="utf-8") for word in STARTS_RANKS)
    return "ranks" if shared else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.split("::", 1)[0])

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All workers must name the same tests in the same order."""

    def place(item: pytest.Item) -> tuple[int, Path]:
        folder = item.path.parent.name
        return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), item.path

    items.sort(key=place)  # stable: within a file the order stays


def pytest_collection_finish() -> None:
    """What the imports of all files have made stays to the end: no collection of garbage need look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    if "tests.dist.spawn" in sys.modules:
        sys.modules["tests.dist.spawn"].end_ranks()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Seconds by folder and the files that take most, so that a suite which grows slow says where."""
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = Path(report.nodeid.split("::")[0])
                folders[path.parent.name] += report.duration
                files[path.stem] += report.duration
    if folders.total() > 60:
        terminalreporter.section("seconds")
        terminalreporter.line(", ".join(f"{name} {count:.0f}" for name, count in folders.most_common()))
        terminalreporter.line(", ".join(f"{name} {count:.0f}" for name, count in files.most_common(SLOWEST)))
