"""Write features in child processes that are killed at random moments; print how many were killed before the end."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import diffusers  # noqa: F401  # once, not in every child
import torch
from transformers import UMT5EncoderModel  # noqa: F401

from tessera.tools.data_features import write_features


def main(recipe: str, folder: str, kills: int) -> None:
    torch.set_num_threads(1)
    draw, killed, longest = random.Random(0), 0, 4.0
    while True:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            write_features(recipe, Path(folder), shard=1, batch=1)
            os._exit(0)
        if killed < kills:
            time.sleep(draw.uniform(0.2, 1.0) * longest)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        if killed < kills:  # it was done before it could be killed: the next ones have less time, and begin anew
            longest = max(0.05, (time.monotonic() - began) / 3)
            for file in Path(folder).iterdir():
                if file.is_file():
                    file.unlink()
            continue
        print(killed)
        sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
