"""A model that lies on several ranks answers as it does on one, through `tessera.load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tessera
from tessera.errors import TesseraError
from tests.dist.layout_cases import FOUR_LAYERS
from tests.dist.spawn import run_ranks
from tests.toys.chat_set import chat_recipe, write_chat_set

LAYOUTS = [{"pp": 2}, {"pp": 2, "schedule": "zbv"}, {"tp": 2}, {}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    recipe = chat_recipe(write_chat_set(folder / "data"), folder, steps=2)
    recipe["model"]["config"] = {**FOUR_LAYERS, "text": {**FOUR_LAYERS["text"], "initializer_range": 0.5}}
    recipe["checkpoint"] = {"export": True, "prove": "never"}
    return tessera.train(recipe).folder


def answers(rank: int, world: int, run: Path, layouts: list[dict[str, Any] | None]) -> list[list[str]]:
    tokens = []
    for layout in layouts:
        for folder in (run, run / "hf"):
            model, processor = tessera.load(folder, device="cpu", parallel=layout)
            pictures = run.parent / "data" / "pictures"
            talks = [
                [
                    {
                        "role": "user",
                        "content": [{"type": "image", "image": "1-0.png"}, {"type": "text", "text": "Say old."}],
                    }
                ],
                [{"role": "user", "content": "Say red blue."}],
            ]
            tokens.append(model.generate(processor(talks, root=pictures), max_new_tokens=6))
    return tokens


@pytest.mark.slow  # the tests of tensor and pipeline parallelism generate as well
def test_answers_do_not_depend_on_the_layout(trained: Path) -> None:
    (alone, exported) = answers(0, 1, trained, [None])
    assert alone == exported
    assert len(set(alone)) == 2
    for rank_answers in run_ranks(answers, 2, trained, LAYOUTS):
        assert rank_answers == [alone] * (2 * len(LAYOUTS))


def test_a_layout_needs_ranks(trained: Path) -> None:
    with pytest.raises(TesseraError) as caught:
        tessera.load(trained, device="cpu", parallel={"pp": 2})
    assert "process group" in caught.value.what


def refused(rank: int, world: int, run: Path) -> str:
    with pytest.raises(TesseraError) as caught:
        tessera.load(run, device="cpu", parallel={"cp": 2})
    return str(caught.value)


@pytest.mark.slow
def test_rows_that_grow_cannot_be_shared(trained: Path) -> None:
    assert "layout.axis-not-for-generation" in run_ranks(refused, 2, trained)[0]
