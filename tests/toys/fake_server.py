"""A server with a fake engine as a program: python -m tests.toys.fake_server FOLDER DRAIN_S DELAY_S"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tessera.runtime import log
from tessera.server.app import make_app
from tessera.server.run import bind, run_server
from tests.toys.chat_service import make_processor, make_service


def main(folder: str, drain_s: str, delay_s: str) -> None:
    service = make_service(make_processor(Path(folder)), slow_client_s=2.0)
    engine: Any = service.engine
    engine.delay_s = float(delay_s)
    with bind("127.0.0.1", 0) as sock, log.on_screen():
        run_server(make_app(service), sock, float(drain_s))
    print(f"answered {len(engine.requests)}, aborted {len(engine.aborted)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
