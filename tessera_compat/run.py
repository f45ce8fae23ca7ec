"""Run a script that imports Megatron or MindSpeed-MM, with both served from Tessera: `python -m tessera_compat.run`.

    tessera run --as-megatron script.py [its arguments]
    torchrun --nproc-per-node 4 -m tessera_compat.run script.py [its arguments]
    torchrun --nproc-per-node 4 script.py [its arguments]        in a folder of `tessera migrate workspace`

The script is not changed. The import hook, the replaced device functions and the global state of the run are
removed when it ends.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from tessera.errors import TesseraError, nearest, reported
from tessera.runtime import log
from tessera.runtime.distributed import environment_ranks, free_port
from tessera_compat import state
from tessera_compat.environment import check_run, prepare_rank
from tessera_compat.script_device import devices_of_this_machine
from tessera_compat.served import ROOTS, NotServed, serving

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def _process_of_its_own(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set sys.argv, sys.path and launcher variables as in a separate process. Restore them after the block."""
    argv, path, environment = list(sys.argv), list(sys.path), dict(os.environ)
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:  # started without a launcher: a single rank
        values = ("0", "1", "0", "127.0.0.1", str(free_port()))
        for name, value in zip(_LAUNCHER, values, strict=True):
            os.environ.setdefault(name, value)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)


def run_script(script: Path, arguments: Sequence[str] = ()) -> dict[str, object]:
    """Run a script as `__main__`, and return its global variables."""
    if not script.is_file():
        near = nearest(script.name, [path.name for path in script.parent.glob("*.py")])
        raise TesseraError(f"no such script: {script}", where="tessera run", nearest=near, code="job.script-missing")
    check_run(environment_ranks()[1])
    state.current().rank_callbacks = prepare_rank()
    joined_before = dist.is_initialized()
    with _process_of_its_own(script, arguments), serving(), devices_of_this_machine():
        try:
            names = runpy.run_path(str(script), run_name="__main__")
        except NotServed:
            raise
        except ImportError as error:
            if (error.name or "").split(".")[0] not in ROOTS:
                raise
            raise TesseraError(
                f"{script.name} imports a name that Tessera does not provide: {error.msg}",
                fix="remove the import; docs/reference/compat-megatron.md lists the provided modules",
                code="megatron.import-not-served",
            ) from error
        finally:
            state.destroy()
            # After an error other ranks may wait in a collective, so the process group is not destroyed here.
            failed = sys.exc_info()[0] is not None
            if dist.is_initialized() and not joined_before and not (failed and dist.get_world_size() > 1):
                dist.destroy_process_group()
    return names


def take_over(package: str) -> None:
    """Make imports of Megatron and MindSpeed-MM load Tessera's modules until this process ends.

    A workspace contains packages with the names of those of Megatron and MindSpeed-MM, which call this function when
    they are imported. `package`: name of the calling package. Tessera's package replaces it in `sys.modules`.
    """
    log.setup(environment_ranks()[0])
    check_run(environment_ranks()[1])
    state.current().rank_callbacks = prepare_rank()
    del sys.modules[package]
    until_the_end = ExitStack()
    until_the_end.enter_context(serving())
    until_the_end.enter_context(devices_of_this_machine())
    atexit.register(until_the_end.close)
    sys.modules[package] = importlib.import_module(package)


def main() -> None:
    """Run the script of the command line."""
    with reported():
        log.setup(environment_ranks()[0])
        if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
            raise TesseraError(
                "the command line names no script",
                fix="python -m tessera_compat.run script.py [its arguments]",
                code="job.script-missing",
            )
        run_script(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    main()
