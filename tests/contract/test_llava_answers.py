"""Exported folders, of a 1.5 model and a OneVision one, answer here and in transformers with the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from answers import export, same_answer
from chats import asked_about
from llava_cases import SHAPES, config_of, conversation, media_of, processor_of, reference_inputs

from tessera.core.batch import Batch
from tessera.core.sample import Message, Sample
from tessera.models.llava import SPEC
from tests.quick import quick

SHOWN = ("text", "one", "several", "video", "mixed")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    models = {}
    for number in (0, 3):
        root = tmp_path_factory.mktemp(f"export-{number}")
        processor = processor_of(SHAPES[number], root)
        models[number] = (processor, export(SPEC, config_of(SHAPES[number]), processor, root / "hf", number))
    return models


@pytest.mark.parametrize(
    ("number", "name"),
    quick([(n, name) for n in (0, 3) for name in SHOWN if name in media_of(SHAPES[n])], (0, "several"), (3, "mixed")),
)
def test_greedy_answers_are_those_of_transformers(number: int, name: str, exports: dict[int, tuple[Any, Path]]) -> None:
    (processor, folder), media = exports[number], media_of(SHAPES[number])[name]

    def inputs(reference: Any, batch: Batch) -> dict[str, Any]:
        """Its pixels are ours, which tests of the processor compare."""
        said = (*conversation(media).messages[:1], Message("assistant", ()))
        item = processor.encode(Sample("one", said), media)
        item.tokens = batch["tokens"]
        return reference_inputs(processor, item, media)

    same_answer(folder, asked_about(*media, question="What is in picture 0?"), inputs, new=10)
