"""The command score: scores of generated images and videos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.run import check_output


def score(
    samples: Annotated[Path, typer.Argument(help="folder of images or videos, or of tessera generate --vbench")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="VBench_full_info.json, JSON {file: prompt}, or a line per file")
    ] = None,
    clip: Annotated[str | None, typer.Option("--clip", help="CLIP model of the CLIP score: folder or hub name")] = None,
    features: Annotated[
        str | None, typer.Option("--features", help="of distances: Inception weights of FID, or a vision model")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="folder, file of --save-features, or .npz statistics")
    ] = None,
    consistency: Annotated[
        str | None, typer.Option("--consistency", help="CLIP, DINO or DINOv2 model of the consistency of frames")
    ] = None,
    save_features: Annotated[
        Path | None, typer.Option("--save-features", help="write the features as a reference: .safetensors")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for scores.json and scores.html")] = Path("scores"),
    device: Annotated[str, typer.Option("--device")] = "auto",
) -> None:
    """Score generated images or videos: CLIP score, FID and KID, consistency of frames."""
    from tessera.evaluation.generation.page import JSON_FILE, write_scores
    from tessera.evaluation.generation.scores import ScoreOptions
    from tessera.evaluation.generation.scores import score as run
    from tessera.runtime import log

    options = ScoreOptions(prompts, clip, features, reference, consistency, save_features)
    options.check()
    check_output(out / JSON_FILE, "--out")
    check_output(save_features, "--save-features")
    with log.on_screen():
        result = run(samples, options, device)
        files = write_scores(out, result)
    for line in [*result.lines(), *(f"wrote {path}" for path in files)]:
        typer.echo(line)
