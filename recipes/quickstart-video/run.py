"""The whole road in one go: videos, VAE, features, training, samples, judgement, report. Each is a verb of yours too.

`--vae KEY=VALUE` and `--model KEY=VALUE` change keys of the two recipes, as on the command line of `tessera train`.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import digits
import judge
import numpy as np
import parts
import torch

import tessera
from tessera.config.reader import parse_overrides
from tessera.config.run_config import load_config
from tessera.diffusion.autoencoders import Autoencoder
from tessera.diffusion.pipeline_folder import PipelineFolder
from tessera.diffusion.sampling.files import Generated
from tessera.tools.data_features import write_features

HERE = Path(__file__).parent
DIGIT, WAY = 0.8, 0.9  # shares of samples that must be right


def main() -> None:
    options = arguments()
    began, folder = time.perf_counter(), options.folder / "parts"
    judged = judge.Judge()
    if not options.sample_only:
        train(options, judged, folder)
    chosen = load_config(HERE / "recipe.yaml", {**changes(options), **options.model})
    # The run, not its export: that is in the files of diffusers, which do not say that captions have 5 tokens.
    with stage(f"5. sampling {options.samples} videos (tessera generate {chosen.folder} --parts {folder} ...)"):
        wanted = [(n % 10, digits.WAYS[n // 10 % 4]) for n in range(options.samples)]
        samples = tessera.pipeline(chosen.folder, parts=folder).generate(
            [digits.caption(*one) for one in wanted],
            frames=digits.FRAMES,
            height=digits.SIDE,
            width=digits.SIDE,
            steps=options.sample_steps,
            guidance=options.guidance,
            seed=1000 * options.seed,
            batch=options.samples,
        )
        verdict = judged(np.stack([sample.frames.mean(-1) for sample in samples]))
        keep(chosen.folder, samples, wanted, verdict)
        report = tessera.report(chosen.folder)
    print(f"report:   {report}")
    print(f"pipeline: {folder} with the transformer of {chosen.folder}")
    digit, way = verdict.right([one for one, _ in wanted], [one for _, one in wanted])
    print(
        f"digit right {digit:.0%}, direction right {way:.0%}, over {len(samples)} samples, "
        f"in {time.perf_counter() - began:.0f} s ({cpu_seconds():.0f} CPU seconds; seed {options.seed})"
    )
    if digit < DIGIT or way < WAY:
        raise SystemExit(f"the result falls short of what this quick start promises: {DIGIT:.0%} and {WAY:.0%}")


def train(options: argparse.Namespace, judged: judge.Judge, folder: Path) -> None:
    """Make the videos and the parts of a pipeline in `made`, and train on them."""
    videos, features = options.folder / "videos", options.folder / "features"
    with stage("1. writing videos of handwritten digits that move"):
        shutil.rmtree(videos, ignore_errors=True)
        count = digits.write(options.folder, options.ways, options.seed)
        print(f"   {count} videos of {digits.FRAMES} frames, {digits.SIDE} x {digits.SIDE}, in {videos}")
        held_out = digits.split(held_out=True)
        real, labels, ways = digits.drawn(held_out, len(held_out), seed=2)
        tell("the judge, on real videos of held-out scans", judged(real).right(labels, ways))

    with stage("2. training a small VAE (PYTHONPATH=recipes/quickstart-video tessera train .../vae.yaml)"):
        chosen = {"train.seed": options.seed, "out": str(options.runs), **options.vae}
        run = tessera.train(HERE / "vae.yaml", chosen, overwrite=True)
        check_finished(run)
        form = load_config(HERE / "vae.yaml", chosen).model.config["arguments"]
        parts.write(folder, run.folder / "hf" / "model.safetensors", form)
        given_back = reconstructed(PipelineFolder(folder).autoencoder().eval(), real)
        tell("the same videos, encoded and decoded", judged(given_back).right(labels, ways))

    here = {**changes(options), **options.model}
    with stage("3. encoding videos and captions once (tessera data features)"):
        shutil.rmtree(features, ignore_errors=True)
        encoders = {"folder": str(folder), "text": {"dtype": "float32"}}
        media = {"data.train": str(options.folder / "train.jsonl"), "train.task_options.encoders": encoders}
        # Small shards: a shard's header is read for each of its samples, and here it is larger than a sample.
        done = write_features(HERE / "recipe.yaml", features, {**here, **media}, batch=16, shard=16)
        for line in done.lines():
            print("   " + line)

    with stage("4. training a small Wan on them (tessera train recipes/quickstart-video/recipe.yaml)"):
        # This run belongs to the quick start and is made anew each time; your own runs are never replaced unasked.
        check_finished(tessera.train(HERE / "recipe.yaml", here, overwrite=True))


def changes(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the arguments change in recipe.yaml."""
    return {
        "train.seed": options.seed,
        "out": str(options.runs),
        "model.tokenizer": str(options.folder / "parts"),
        "data.train": str(options.folder / "features"),
        "train.preview.folder": str(options.folder / "parts"),
        "train.preview.guidance": options.guidance,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of videos, initial weights, order, noise and samples")
    parser.add_argument("--folder", type=Path, default=Path("build/quickstart-video"), help="for data and parts")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="for the two runs")
    parser.add_argument("--ways", type=int, default=2, choices=range(1, 5), help="videos of each scan")
    parser.add_argument("--samples", type=int, default=100, help="videos that are sampled and judged")
    parser.add_argument("--sample-steps", type=int, default=12, help="steps of the solver")
    parser.add_argument("--guidance", type=float, default=4.0, help="how strongly captions guide")
    parser.add_argument("--sample-only", action="store_true", help="sample again from what was trained before")
    parser.add_argument("--vae", action="append", default=[], metavar="KEY=VALUE", help="of vae.yaml")
    parser.add_argument("--model", action="append", default=[], metavar="KEY=VALUE", help="of recipe.yaml")
    options = parser.parse_args()
    options.vae, options.model = parse_overrides(options.vae), parse_overrides(options.model)
    return options


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Say what begins, and how long it took."""
    print(title, flush=True)
    began, before = time.perf_counter(), cpu_seconds()
    yield
    seconds = time.perf_counter() - began
    print(f"   took {seconds:.0f} s ({cpu_seconds() - before:.0f} CPU seconds)", flush=True)


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def check_finished(run: tessera.Run) -> None:
    if run.stopped:
        raise SystemExit(f"stopped by {run.stopped}; `tessera resume {run.folder}` goes on")


def tell(what: str, right: tuple[float, float]) -> None:
    print(f"   {what}: digit right {right[0]:.1%}, direction right {right[1]:.1%}", flush=True)


@torch.no_grad()
def reconstructed(vae: Autoencoder, videos: np.ndarray) -> np.ndarray:
    """Return grey videos as they come back from the VAE."""
    colour = [torch.from_numpy(video).unsqueeze(-1).expand(-1, -1, -1, 3) for video in videos]
    return np.stack([video.numpy().mean(-1) for video in vae.decode(vae.encode(colour))])


def keep(folder: Path, samples: Sequence[Generated], wanted: Sequence[tuple[int, str]], verdict: judge.Verdict) -> None:
    """Write the samples and what the judge says of them, for the report."""
    (folder / "samples").mkdir(exist_ok=True)
    rows: list[Mapping[str, Any]] = []
    for number, (sample, (digit, way)) in enumerate(zip(samples, wanted, strict=True)):
        path = folder / "samples" / f"{number:03d}.gif"
        path.write_bytes(digits.as_gif(sample.frames.mean(-1).astype(np.uint8)))
        answer, expected = f"{verdict.digits[number]} {verdict.ways[number]}", f"{digit} {way}"
        rows.append(
            {
                "group": "judged samples",
                "question": sample.prompt,
                "images": [str(path.relative_to(folder))],
                "answer": answer,
                "expected": expected,
                "correct": answer == expected,
            }
        )
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
