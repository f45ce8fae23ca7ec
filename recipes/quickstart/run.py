"""The whole road in one go: data, training, answers, export, proof, report. Each step is a verb you can call too."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import prepare

import tessera

HERE = Path(__file__).parent
DATA = Path("build/quickstart")


def main() -> None:
    print("1. writing data: 1,797 scans of handwritten digits as chat samples")
    prepare.main(DATA)

    print("2. training (tessera train recipes/quickstart/recipe.yaml)")
    started = time.perf_counter()
    # This run belongs to the quick start and is made anew each time; your own runs are never replaced unasked.
    run = tessera.train(HERE / "recipe.yaml", overwrite=True)
    if run.stopped:
        raise SystemExit(f"stopped by {run.stopped}; `tessera resume {run.folder}` goes on")
    print(f"   trained in {time.perf_counter() - started:.0f} s")

    print(f"3. answering held-out questions (tessera eval {run.folder})")
    score = tessera.evaluate(run.folder)
    for line in score.lines():
        print("   " + line)

    print(f"4. proving the export (tessera compare {run.folder}/hf --data {DATA}/held_out.jsonl)")
    agreement = tessera.compare(run.folder / "hf", DATA / "held_out.jsonl")
    for line in agreement.lines():
        print("   " + line)

    print("5. drawing the reports")
    print(f"   training: {tessera.report(run.folder)}")
    print(f"   answers:  {score.report}")
    print(f"checkpoint:          {run.checkpoint}")
    print(f"Hugging Face folder: {run.folder / 'hf'}")
    command = os.path.relpath(Path(sys.executable).with_name("tessera"))  # on nobody's path yet
    print(f'ask it: {command} generate {run.folder} --image {DATA}/pictures/0007-0.png "What digit is this?"')
    single = score.results[0].categories["images"]["1 image"].figures["accuracy"].value
    if single < 0.97 or not agreement.complete:
        raise SystemExit(
            "the result falls short of what this quick start promises: 0.97 on single digits, full agreement"
        )


if __name__ == "__main__":
    main()
