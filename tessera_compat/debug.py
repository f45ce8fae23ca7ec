"""Let ranks wait for a debugger, and write the file by which VS Code attaches to them.

`TESSERA_DEBUG=0,2` makes ranks 0 and 2 wait before they begin, each on port 22333 plus its rank, at the loopback
address unless `TESSERA_DEBUG_HOST` names another. Whoever reaches the port can run code in the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, first_line
from tessera.runtime.distributed import environment_ranks

VARIABLE, HOST_VARIABLE = "TESSERA_DEBUG", "TESSERA_DEBUG_HOST"
FIRST_PORT = 22333
LOOPBACK = "127.0.0.1"
_MAX_RANKS = 65536 - FIRST_PORT
_PAUSE_S = 24 * 3600.0  # timeout in seconds: other ranks wait for a rank that is stopped at a breakpoint
LAUNCH_FILE = Path(".vscode") / "launch.json"


def debugged_ranks(world_size: int | None, environ: Mapping[str, str] = os.environ) -> list[int]:
    """Return the ranks that `TESSERA_DEBUG` lists: single ranks and ranges such as 0,2-3, or all.

    `world_size` is None while the number of machines is unknown.
    """
    text = environ.get(VARIABLE, "")
    if text == "":
        return []
    allowed = ["0", "0,2", "0-3", "all"]
    if text == "all":
        if world_size is None:
            raise TesseraError(
                "the number of ranks is not known yet, so `all` cannot be resolved",
                where=f"{VARIABLE}=all",
                allowed=allowed[:3],
                code="environment.rank-count-unknown",
            )
        return list(range(world_size))
    ranks: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise TesseraError(
                f"not a rank: {item!r}", where=f"{VARIABLE}={text}", allowed=allowed, code="environment.no-such-rank"
            )
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if world_size is not None and max(ranks) >= world_size:
        raise TesseraError(
            f"there is no rank {max(ranks)}: the run has {world_size} ranks",
            where=f"{VARIABLE}={text}",
            allowed=[f"0 to {world_size - 1}"],
            code="environment.no-such-rank",
        )
    return sorted(ranks)


def check_debug(world_size: int | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Check the debug variables before ranks start. Return settings that let ranks stop at breakpoints."""
    if not debugged_ranks(world_size, environ):
        return {}
    _debugger()
    return {
        "parallel.join_timeout_s": _PAUSE_S,
        "parallel.timeout_s": _PAUSE_S,
        "parallel.watch": False,  # the watchdog would end a rank that is stopped at a breakpoint
    }


def wait_for_debugger(environ: Mapping[str, str] = os.environ) -> None:
    """Wait for a debugger if `TESSERA_DEBUG` names this rank."""
    rank, world_size, _ = environment_ranks(environ)
    if rank in debugged_ranks(world_size, environ):
        setup_debugpy(environ.get(HOST_VARIABLE, LOOPBACK))


def setup_debugpy(host: str = LOOPBACK, base_port: int = FIRST_PORT) -> None:
    """Listen on `base_port` plus the rank of this process, and wait until a debugger attaches.

    Scripts call it without arguments. If other machines must reach the port, pass an address of this machine, or
    0.0.0.0 for all its addresses. Whoever connects can run code in this process.
    """
    debugger = _debugger()
    rank = environment_ranks()[0]
    port = base_port + rank
    try:
        debugger.listen((host, port))
    except (OSError, RuntimeError) as error:
        raise TesseraError(
            f"rank {rank} cannot listen on {host}:{port}: {first_line(error)}",
            where=VARIABLE,
            fix="end the program that uses the port, or set another address: " + HOST_VARIABLE,
            code="environment.debug-port",
        ) from None
    print(f"[Rank {rank}] Waiting for debugger attach on port {port}...", flush=True)
    debugger.wait_for_client()
    print(f"[Rank {rank}] Debugger attached!", flush=True)


def _debugger() -> Any:
    try:
        import debugpy
    except ModuleNotFoundError:
        raise TesseraError(
            "the debugger debugpy is not installed",
            where=VARIABLE,
            fix="pip install 'tessera-mm[debug]'",
            code="environment.no-debugpy",
        ) from None
    return debugpy


def vscode_launch(ranks: Sequence[int], host: str = "localhost", remote_root: str = ".") -> str:
    """Return the text of launch.json: one entry for each rank, and an entry that attaches to all ranks."""
    if not ranks or max(ranks) >= _MAX_RANKS:
        raise TesseraError(
            f"only ranks 0 to {_MAX_RANKS - 1} have a port: ports begin at {FIRST_PORT}",
            where="--nproc",
            code="environment.no-such-rank",
        )
    entries = [
        {
            "name": f"Attach to Worker {rank}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": host, "port": FIRST_PORT + rank},
            "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": remote_root}],
            "justMyCode": False,
        }
        for rank in ranks
    ]
    together = {"name": "Attach to all workers", "configurations": [entry["name"] for entry in entries]}
    return json.dumps({"version": "0.2.0", "configurations": entries, "compounds": [together]}, indent=2) + "\n"


def write_vscode(folder: Path, text: str, overwrite: bool = False) -> list[str]:
    """Write `.vscode/launch.json` in a folder, and return messages. An existing file is renamed to launch.json.bak."""
    path = folder / LAUNCH_FILE
    messages = []
    try:
        if path.exists():
            if path.read_text(encoding="utf-8") == text:
                return [f"{path} is already up to date"]
            if not overwrite:
                raise TesseraError(
                    f"{path} already exists",
                    where="tessera vscode",
                    fix="add --overwrite, which keeps the old file as launch.json.bak; or --print to copy entries",
                    code="output.file-exists",
                )
            backup = path.with_name("launch.json.bak")
            path.replace(backup)
            messages.append(f"kept the old file as {backup}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TesseraError(
            f"{path} cannot be written: {first_line(error)}", where="tessera vscode", code="output.cannot-write"
        ) from None
    return [*messages, f"wrote {path}"]
