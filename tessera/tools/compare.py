"""An export proves itself: plain `transformers` loads the folder and gives the same answers as we do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tessera.core.errors import TesseraError
from tessera.core.types import Message
from tessera.data.media.images import Limits
from tessera.data.media.read import decode
from tessera.data.media.video import VideoSampling
from tessera.data.questions import Question, questions
from tessera.evaluate.answers import answer_all, held_out_sources
from tessera.infer.load import load


@dataclass(frozen=True)
class Agreement:
    answers: list[tuple[str, str, str]]  # sample id, our answer, theirs

    @property
    def same(self) -> int:
        return sum(ours == theirs for _, ours, theirs in self.answers)

    @property
    def complete(self) -> bool:
        return self.same == len(self.answers)

    def lines(self) -> list[str]:
        total = len(self.answers)
        out = [f"agreement with transformers: {self.same / total:.2%} of {total} held-out answers"]
        different = [row for row in self.answers if row[1] != row[2]]
        out += [f"  {name}: ours {ours!r}, theirs {theirs!r}" for name, ours, theirs in different[:10]]
        return out


def compare(
    folder: str | Path,
    data: str | Path,
    *,
    root: str | Path | None = None,
    max_samples: int | None = None,
    max_new_tokens: int = 32,
    batch: int = 64,
) -> Agreement:
    """Both sides answer greedily from the same messages and pictures, each with its own preprocessing."""
    folder = Path(folder)
    sources = held_out_sources(folder, data, root, max_samples)
    asked = [q for q in questions(sources) if isinstance(q, Question)]
    if not asked:
        raise TesseraError("no sample could be used", where=str(data))
    model, processor = load(folder)
    processor = replace(processor, limits=replace(processor.limits, draft=False))  # as the other side decodes
    ours: list[str] = []
    for at in range(0, len(asked), batch):
        ours += answer_all(model, processor, asked[at : at + batch], max_new_tokens)
    theirs = _Transformers(folder).answer(asked, max_new_tokens, batch)
    return Agreement([(q.sample.id, a, b) for q, a, b in zip(asked, ours, theirs, strict=True)])


class _Transformers:
    """The stock library, used as its own documentation says, with nothing of ours in between."""

    def __init__(self, folder: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise TesseraError("comparing needs `transformers`", fix="pip install tessera-mm[hf]") from None
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._images = transformers.AutoImageProcessor.from_pretrained(folder)

    @torch.no_grad()
    def answer(self, asked: Sequence[Question], max_new_tokens: int, batch: int) -> list[str]:
        # Alike questions together: no padding then, so each is answered just as it would be alone.
        by_shape: dict[tuple[int, ...], list[int]] = {}
        encoded: list[dict[str, Any]] = []
        for number, question in enumerate(asked):
            inputs = self._inputs(question)
            encoded.append(inputs)
            grid = tuple(inputs["image_grid_thw"].flatten().tolist()) if "image_grid_thw" in inputs else ()
            by_shape.setdefault((inputs["input_ids"].shape[1], *grid), []).append(number)
        answers = [""] * len(asked)
        for numbers in by_shape.values():
            for at in range(0, len(numbers), batch):
                group = numbers[at : at + batch]
                joined = {k: torch.cat([encoded[n][k] for n in group]) for k in encoded[group[0]]}
                out = self._model.generate(**joined, max_new_tokens=max_new_tokens, do_sample=False)
                tail = out[:, joined["input_ids"].shape[1] :]
                for n, text in zip(group, self._tokenizer.batch_decode(tail, skip_special_tokens=True), strict=True):
                    answers[n] = text
        return answers

    def _inputs(self, question: Question) -> dict[str, Any]:
        """Tokenizer, chat template and image processor one by one: the library's joint processor would do the same, but
        cannot be made without torchvision, which only its video half needs."""
        if any(part.kind != "image" for part in question.sample.media()):
            raise TesseraError(f"sample {question.sample.id} has a clip: comparing serves pictures and text")
        messages = [_plain(m) for m in question.sample.messages]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pictures = [decode(p, question.root, Limits(), VideoSampling()) for p in question.sample.media()]
        seen = dict(self._images(images=pictures, return_tensors="pt")) if pictures else {}
        place = self._tokenizer.convert_ids_to_tokens(self._model.config.image_token_id)
        head, *tail = text.split(place)
        if len(tail) != len(pictures):
            raise TesseraError(f"the chat template made {len(tail)} places for {len(pictures)} pictures")
        tiles = seen.pop("num_patches", None)
        for number, rest in enumerate(tail):
            if tiles is None:
                head += place * int(seen["image_grid_thw"][number].prod() // self._images.merge_size**2) + rest
            else:
                shown = place * int(tiles[number]) * self._model.config.image_seq_length
                head += f"{self._tokenizer.start_image_token}{shown}{self._tokenizer.end_image_token}{rest}"
        tokens = self._tokenizer(head, return_tensors="pt")
        if hasattr(self._model.config, "image_seq_length"):  # families whose positions know no pictures
            return {**tokens, **seen}
        kinds = (tokens["input_ids"] == self._model.config.image_token_id).long()
        return {**tokens, "mm_token_type_ids": kinds, **seen}


def _plain(message: Message) -> dict[str, Any]:
    parts = [{"type": p.kind, "text": p.value} if p.kind == "text" else {"type": p.kind} for p in message.parts]
    return {"role": message.role, "content": parts}
