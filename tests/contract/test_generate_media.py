"""`tessera generate` with a generation model: files, metadata, the same again; and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import tessera
from tessera.cli.main import app, main
from tests.toys.sampling_folders import write_wan

SMALL = ("--height", "32", "--width", "48", "--frames", "5", "--steps", "1")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    write_wan(folder)
    return folder


def test_a_sample_is_written_beside_its_settings(wan: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gif"
    words = ["generate", str(wan), "--prompt", "a red kite", "--out", str(out), "--seed", "3", "--device", "cpu"]
    first = CliRunner().invoke(app, [*words, *SMALL])
    assert first.exit_code == 0, first.output
    assert f"wrote {out}" in first.output
    assert "step 1 of 1" in first.output
    described = json.loads((tmp_path / "x.json").read_text())
    assert described["request"]["steps"] == 1
    assert described["request"]["guidance"] == 5.0, "what the command left open is written out"


@pytest.mark.slow
def test_prompts_of_a_file_are_numbered_samples(wan: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\nthe dog\n")
    words = ["generate", str(wan), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "x.png")]
    result = CliRunner().invoke(app, [*words, *SMALL, "--frames", "1", "--count", "2", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"x-{n}.png" for n in range(4)]
    assert "sample 4 of 4, step 1 of 1" in result.output
    (alone,) = tessera.pipeline(wan, device="cpu").generate("the dog", seed=3, height=32, width=48, frames=1, steps=1)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "x-3.png")), alone.frames[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL", "a cat"], "generation.no-output-file"),
        (["MODEL", "--out", "x.png"], "generation.no-prompt"),
        (["MODEL", "a cat", "--out", "x.png", "--temperature", "1"], "--temperature has no effect"),
        (["MODEL", "a cat", "--out", "x.png", "--top-k", "1", "--top-p", "1"], "--top-k and --top-p have no effect"),
        (["MODEL", "a cat", "--out", "x.png", "--frames", "5"], "a PNG file contains one image"),
        (["MODEL", "a cat", "--out", "x.avi"], "no supported suffix"),
        (["MODEL", "a cat", "--out", "x.png", "--height", "-3"], "height"),
        (["MODEL", "a </s> cat", "--out", "x.png", "--frames", "1"], "special token"),
        (["MODEL", "a cat", "--out", "x.png", "--frames", "1", "--parts", "NONE"], "--parts FOLDER"),
        ([], "generation.no-model"),
    ],
)
def test_what_means_nothing_is_refused_with_code_2(
    wan: Path,
    tmp_path: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    named = [str(wan) if word == "MODEL" else word for word in words]
    monkeypatch.setattr("sys.argv", ["tessera", "generate", *named])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ranks_that_a_command_starts_write_the_sample_of_one_process(wan: Path, tmp_path: Path) -> None:
    def generate(name: str, *words: str) -> tuple[np.ndarray, str]:
        out = tmp_path / name
        command = [sys.executable, "-m", "tessera.cli.main", "generate", str(wan), "--prompt", "a -- red kite"]
        command += ["--out", str(out), "--device", "cpu", *SMALL, "--frames", "1", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return np.asarray(Image.open(out)).astype(int), done.stdout + done.stderr

    alone, _ = generate("one.png")
    shared, said = generate("two.png", "--nproc", "2", "--vae-slicing")
    assert np.abs(alone - shared).max() <= 1, "rounding may move a value over the border of a level"
    assert said.count("step 1 of 1") == 1, "the first rank tells how far it is"
    described = json.loads((tmp_path / "two.json").read_text())
    assert described["made_with"]["ranks"] == "2"
    assert described["request"]["vae_slicing"] is True


def test_a_layout_without_ranks_is_refused(wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(wan), "a cat", "--out", str(tmp_path / "x.png"), *SMALL, "--frames", "1", "--cp", "2"]
    result = CliRunner().invoke(app, words)
    assert "layout.needs-more-ranks" in str(result.exception)
    assert "--nproc 2" in str(result.exception)
