"""The quick start for audio: its data are spoken digits that the recipe's model reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.config.run_config import load_config
from tessera.core.sample import Message, Part, Sample
from tessera.data.media.files import Limits
from tessera.data.media.read import read_media
from tessera.models import resolve

FOLDER = Path(__file__).parents[2] / "recipes" / "quickstart-audio"
PREPARE = """
import sys
from pathlib import Path
import prepare
prepare.main(Path(sys.argv[1]), 8, 4, seed=1)
"""


@pytest.mark.slow
def test_spoken_digits_are_read_by_the_model_of_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")
    # A process of its own, because the synthesiser is a library with global state.
    subprocess.run([sys.executable, "-c", PREPARE, str(tmp_path)], cwd=FOLDER, check=True)
    spec, config = resolve(load_config(FOLDER / "recipe.yaml").model)
    assert spec.processor is not None
    processor = spec.processor(config, tmp_path / "tokenizer")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 8
    for row in rows:
        question, answer = row["messages"]
        said = answer["content"].removeprefix("language English<asr_text>")
        assert said in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
        clip = Part("audio", question["content"][0]["audio"])
        sample = Sample("one", (Message("user", (clip,)), Message("assistant", (Part("text", answer["content"]),))))
        media, sizes = read_media(sample, tmp_path, Limits(), processor)
        assert 4_000 < sizes[0].samples < 24_000
        assert 0.1 < abs(media[0]).max() <= 1
        encoded = processor.encode(sample, media, sizes)  # type: ignore[attr-defined]
        assert encoded.streams["audio"].tensors["mel"].shape[1] == 80 * 15
        assert processor.decode(encoded.tokens[encoded.labels >= 0].tolist()).startswith(answer["content"])  # type: ignore[attr-defined]
