"""Run the command line as `python -m tessera`, for an interpreter whose folder of programs is not on the PATH."""

from __future__ import annotations

from tessera.cli.start import main

if __name__ == "__main__":
    main()
