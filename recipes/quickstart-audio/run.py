"""The whole road in one go: speech, training, transcripts, export, proof, report. Each step is a verb you can call too.

`KEY=VALUE` arguments change keys of the recipe, as on the command line of `tessera train`.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

import prepare

import tessera
from tessera.config.reader import parse_overrides

HERE = Path(__file__).parent
RIGHT = 0.9  # share of held-out clips that must be written down without a mistake


def main() -> None:
    options = arguments()
    data, began = options.folder, time.perf_counter()
    print(f"1. speaking digits: {options.train} clips to train on, {options.held_out} by speakers that are held out")
    prepare.main(data, options.train, options.held_out, options.seed)

    print("2. training (tessera train recipes/quickstart-audio/recipe.yaml)")
    started = time.perf_counter()
    changes = {
        "model.tokenizer": str(data / "tokenizer"),
        "data.train": str(data / "train.jsonl"),
        "data.eval": str(data / "held_out.jsonl"),
        "train.seed": options.seed,
        "out": str(options.runs),
        **parse_overrides(options.changes),
    }
    # This run belongs to the quick start and is made anew each time; your own runs are never replaced unasked.
    run = tessera.train(HERE / "recipe.yaml", changes, overwrite=True)
    if run.stopped:
        raise SystemExit(f"stopped by {run.stopped}; `tessera resume {run.folder}` goes on")
    print(f"   trained in {time.perf_counter() - started:.0f} s")

    print(f"3. writing down what held-out speakers say (tessera eval {run.folder})")
    score = tessera.evaluate(run.folder)
    for line in score.lines():
        print("   " + line)

    print(f"4. proving the export (tessera compare {run.folder}/hf --data {data}/held_out.jsonl)")
    agreement = tessera.compare(run.folder / "hf", data / "held_out.jsonl")
    for line in agreement.lines():
        print("   " + line)

    print("5. drawing the reports")
    print(f"   training: {tessera.report(run.folder)}")
    print(f"   answers:  {score.report}")
    print(f"Hugging Face folder: {run.folder / 'hf'}")
    command = os.path.relpath(Path(sys.executable).with_name("tessera"))  # on nobody's path yet
    print(f"ask it: {command} generate {run.folder} --audio {data}/clips/held_out-00000.wav")
    right = score.results[0].figures["accuracy"].value
    seconds = time.perf_counter() - began
    print(f"held-out speakers: {right:.1%} right, in {seconds:.0f} s ({cpu_seconds():.0f} CPU seconds)")
    if right < RIGHT or not agreement.complete:
        raise SystemExit(f"the result falls short of what this quick start promises: {RIGHT:.0%}, full agreement")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of voices, words, noise, initial weights and order")
    parser.add_argument("--folder", type=Path, default=Path("build/quickstart-audio"), help="for clips and tokenizer")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="for the run")
    parser.add_argument("--train", type=int, default=6000, help="clips to train on")
    parser.add_argument("--held-out", type=int, default=200, help="clips by held-out speakers")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="of recipe.yaml")
    return parser.parse_args()


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
