"""Start the command line. Ctrl-C ends it without a traceback, also while its modules are imported."""

from __future__ import annotations


def main() -> None:
    try:
        from tessera.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
