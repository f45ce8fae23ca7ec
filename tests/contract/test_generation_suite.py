"""Samples of a benchmark: the layout of VBench, seeds, continuing, and what is refused; then their scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app
from tessera.diffusion.sampling.pipeline import Pipeline
from tessera.errors import TesseraError
from tessera.evaluation.generation.samples import read_samples
from tessera.evaluation.generation.sampling import adapter_facts, sample_suite
from tessera.evaluation.generation.scores import ScoreOptions, score
from tessera.evaluation.generation.suite import CUSTOM_DIMENSIONS, read_suite
from tests.errors import raises
from tests.toys.sampling_folders import write_wan
from tests.toys.scored_samples import write_clip

SMALL = {"height": 32, "width": 48, "frames": 1, "steps": 1, "count": 2, "seed": 7}
ENTRIES = [
    {"prompt_en": "a red kite", "dimension": ["object_class", "color"], "auxiliary_info": {"color": {"color": "red"}}},
    {"prompt_en": "the dog.", "dimension": ["scene"]},
    {"prompt_en": "a red kite", "dimension": ["scene"], "auxiliary_info": {"scene": {"scene": "beach"}}},
]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    write_wan(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "VBench_full_info.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def vbench_reads(folder: Path, info: Path, dimension: str) -> dict[str, list[str]]:
    """Look the videos of a dimension up as VBench's evaluator does."""
    names = os.listdir(folder)
    suffix = os.path.splitext(names[0])[1]
    wanted = [entry for entry in json.loads(info.read_text()) if dimension in entry["dimension"]]
    texts = [entry["prompt_en"] for entry in wanted]
    return {text: [name for i in range(5) if (name := f"{text}-{i}{suffix}") in names] for text in texts}


def test_vbench_finds_the_videos(wan: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = {key: str(value) for key, value in {**SMALL, "frames": 5, "count": 1}.items()}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    run = ["generate", str(wan), "--vbench", str(prompts), "--out", str(out), "--device", "cpu", *words]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    assert f"wrote {out}: 2 samples" in result.output
    assert sorted(os.listdir(out)) == ["full_info.json", "protocol.json", "samples", "samples.jsonl"]
    assert vbench_reads(out / "samples", prompts, "scene") == {
        "the dog.": ["the dog.-0.mp4"],
        "a red kite": ["a red kite-0.mp4"],
    }
    info = json.loads((out / "full_info.json").read_text())
    assert info[0]["dimension"] == ["object_class", "color", "scene"]
    assert info[0]["auxiliary_info"] == {"color": {"color": "red"}, "scene": {"scene": "beach"}}
    assert info[0]["video_list"] == ["samples/a red kite-0.mp4"]
    samples = read_samples(out)
    assert [(sample.prompt, sample.seed) for sample in samples.samples] == [("a red kite", 7), ("the dog.", 8)]
    assert samples.samples[0].frames().shape == (5, 32, 48, 3)
    again = CliRunner().invoke(app, run)
    assert "2 samples, 2 of them earlier" in again.output


def test_an_interrupted_benchmark_continues_with_the_same_samples(
    wan: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sample_suite(wan, prompts, whole, SMALL, device="cpu")
    sample, calls = Pipeline.sample, [0]

    def broken(self: Pipeline, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return sample(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "sample", broken)
        with pytest.raises(KeyboardInterrupt):
            sample_suite(wan, prompts, parts, SMALL, device="cpu")
    assert len(os.listdir(parts / "samples")) == 2
    with raises("evaluation.samples-missing", "2 of 4"):
        read_samples(parts)
    with (parts / "samples.jsonl").open("a") as file:
        file.write('{"file": "the dog.-0')  # a torn line, and a file that was not recorded
    (parts / "samples" / "the dog.-0.png").write_bytes(b"torn")
    result = sample_suite(wan, prompts, parts, SMALL, device="cpu")
    assert (result.samples, result.earlier) == (4, 2)
    for name in os.listdir(whole / "samples"):
        assert (whole / "samples" / name).read_bytes() == (parts / "samples" / name).read_bytes()
    (alone,) = tessera.pipeline(wan, device="cpu").generate(
        "the dog.", seed=7 + 2 + 1, height=32, width=48, frames=1, steps=1
    )
    assert np.array_equal(np.asarray(Image.open(parts / "samples" / "the dog.-1.png")), alone.frames[0])
    with raises("output.other-settings", "sampling"):
        sample_suite(wan, prompts, parts, {**SMALL, "steps": 2}, device="cpu")
    (parts / "protocol.json").unlink()
    with raises("output.other-files"):
        sample_suite(wan, prompts, parts, SMALL, device="cpu")


@pytest.mark.slow
def test_ranks_share_the_samples_of_a_benchmark(wan: Path, prompts: Path, tmp_path: Path) -> None:
    sample_suite(wan, prompts, tmp_path / "alone", SMALL, device="cpu")
    words = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    run = [sys.executable, "-m", "tessera.cli.main", "generate", str(wan), "--vbench", str(prompts), "--nproc", "2"]
    for earlier in ("", ", 4 of them earlier"):
        done = subprocess.run(
            [*run, "--out", str(tmp_path / "ranks"), "--device", "cpu", *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"4 samples{earlier}\n" in done.stdout
    for file in sorted((tmp_path / "alone" / "samples").iterdir()):
        paths = [tmp_path / name / "samples" / file.name for name in ("alone", "ranks")]
        pixels = [np.asarray(Image.open(path)).astype(int) for path in paths]
        assert np.abs(pixels[0] - pixels[1]).max() <= 1, "a rounding of the sums over ranks moves a pixel by one"


@pytest.mark.slow
def test_the_protocol_of_a_benchmark_tells_models_apart(wan: Path, prompts: Path, tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip")
    same, other = tmp_path / "same", tmp_path / "other" / wan.name
    write_wan(same)
    write_wan(other)
    file = next(iter((other / "transformer").glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    fingerprints = []
    for number, model in enumerate((wan, same, other)):
        out = tmp_path / str(number)
        sample_suite(model, prompts, out, SMALL, device="cpu")
        result = score(out, ScoreOptions(clip=clip), "cpu")
        assert result.rows[0]["seed"] == 7
        assert result.protocol["generation"]["sampling"]["guidance"] == 5.0
        fingerprints.append(result.fingerprint)
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0] != fingerprints[2], "a bit of the weights differs"


def test_adapters_of_a_protocol_are_told_by_content_and_strength(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    first, second = paths
    assert adapter_facts({first: 1.0, second: 0.5}) == adapter_facts({second: 0.5, first: 1.0})
    assert adapter_facts({first: 1.0, second: 0.5}) != adapter_facts({first: 0.5, second: 1.0})


def test_prompts_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a cat\n\nthe dog\na cat\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "scene": 3}\n{"prompt_en": "the dog"}\n')
    (tmp_path / "p.json").write_text('["a cat", "the dog"]')
    for name in ("p.txt", "p.jsonl", "p.json"):
        suite = read_suite(tmp_path / name)
        assert [prompt.text for prompt in suite] == ["a cat", "the dog"]
        assert suite[0].dimensions == list(CUSTOM_DIMENSIONS)
    assert read_suite(tmp_path / "p.jsonl")[0].columns["scene"] == 3


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[]", "generation.no-prompts-in-file"),
        ('{"a": 1}', "generation.not-a-prompt-list"),
        ('[{"prompt_en": 3}]', "generation.bad-prompt-row"),
        ('[{"prompt_en": " "}]', "generation.bad-prompt-row"),
        ('[{"prompt_en": "a", "dimension": "scene"}]', "generation.bad-prompt-row"),
        ("[null]", "generation.bad-prompt-row"),
        ('["a/../../b"]', "generation.prompt-not-a-file-name"),
        ('["a\\u0000b"]', "generation.prompt-not-a-file-name"),
        (json.dumps(["a cat " * 50]), "generation.prompt-not-a-file-name"),
        ("[", "environment.not-json"),
    ],
)
def test_bad_prompts_are_named_before_anything_is_written(wan: Path, tmp_path: Path, content: str, code: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with raises(code):
        sample_suite(wan, tmp_path / "p.json", tmp_path / "out", SMALL, device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--prompt", "a cat"], "generation.option-without-effect"),
        (["--width", "47"], "generation.size-not-whole-patches"),
        (["--steps", "0"], "recipe.wrong-value"),
    ],
)
def test_options_of_the_command_are_checked(
    wan: Path, prompts: Path, tmp_path: Path, words: list[str], code: str
) -> None:
    run = ["generate", str(wan), "--vbench", str(prompts), "--out", str(tmp_path / "out"), "--device", "cpu", *words]
    result = CliRunner().invoke(app, run)
    assert isinstance(result.exception, TesseraError)
    assert result.exception.code == code
    assert not (tmp_path / "out").exists()


def test_an_output_file_is_refused(wan: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with raises("output.not-a-folder"):
        sample_suite(wan, prompts, tmp_path / "out", SMALL, device="cpu")
    assert (tmp_path / "out").read_text() == "mine"
