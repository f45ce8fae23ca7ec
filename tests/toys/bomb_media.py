"""Reads media files one by one, each in a worker process of its own: `python -m tests.toys.bomb_media BOMBS SOUND`.

BOMBS and SOUND are folders; files are named KIND-NAME. The sound ones are read first, so that what libraries keep for
good is not blamed on a bomb. Prints for each bomb how much memory rose, and what was said.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import cast

from tessera.core.sample import Part, PartKind
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode, probe
from tessera.errors import TesseraError
from tessera.workers.worker import WORKER_VARIABLE
from tests.toys.memory import peak_mib


def said(file: Path) -> list[str]:
    part = Part(cast(PartKind, file.name.split("-")[0]), file.name)
    words = []
    for what in (probe, decode):
        try:
            what(part, file.parent, Limits(), MediaSampling(audio=AudioSampling(16_000)))
            words.append("read")
        except TesseraError as error:
            words.append(error.what)
        except BaseException as error:
            words.append(f"escaped: {error!r}")
    return words


def main(bombs: Path, sound: Path) -> None:
    for file in sorted(sound.iterdir()):
        said(file)
    for file in sorted(bombs.iterdir()):
        if os.fork() == 0:
            os.environ[WORKER_VARIABLE] = "1"
            before, began = peak_mib(), time.perf_counter()
            words = said(file)
            rise, took = peak_mib() - before, time.perf_counter() - began
            print(json.dumps({"name": file.name, "rise_mib": rise, "seconds": took, "said": words}), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
