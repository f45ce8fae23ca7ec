"""Compare the answers of Tessera with those of plain `transformers`, which loads the same folder with its processor."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tessera.core.errors import TesseraError, first_line
from tessera.core.types import Message
from tessera.data.media.files import Limits
from tessera.data.media.read import decode
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.source import Question, questions
from tessera.evaluation.evaluate import answer_all, held_out_sources
from tessera.inference.load import load


@dataclass(frozen=True)
class Agreement:
    """Hold the answers of both sides."""

    answers: list[tuple[str, str, str]]  # sample id, answer of Tessera, answer of transformers

    @property
    def same(self) -> int:
        return sum(answer == expected for _, answer, expected in self.answers)

    @property
    def complete(self) -> bool:
        return self.same == len(self.answers)

    def lines(self) -> list[str]:
        total = len(self.answers)
        out = [f"agreement with transformers: {self.same / total:.2%} of {total} held-out answers"]
        different = [row for row in self.answers if row[1] != row[2]]
        out += [f"  {name}: Tessera {answer!r}, transformers {other!r}" for name, answer, other in different[:10]]
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
    """Generate greedily on both sides from the same messages and decoded images.

    Everything after decoding is done twice: here, and by the processor, chat template and model of transformers.
    """
    folder = Path(folder)
    if (folder / "config.yaml").is_file():
        raise TesseraError(
            "this is a run or a checkpoint, which transformers cannot load",
            where=str(folder),
            fix=f"`tessera convert {folder} FOLDER` writes a Hugging Face folder; with checkpoint.export it is RUN/hf",
        )
    sources = held_out_sources(folder, data, root, max_samples)
    asked = [q for q in questions(sources) if isinstance(q, Question)]
    if not asked:
        raise TesseraError("no sample could be used", where=str(data))
    model, processor = load(folder)
    processor = replace(processor, limits=replace(processor.limits, jpeg_draft=False))  # as the other side decodes
    answers: list[str] = []
    for at in range(0, len(asked), batch):
        answers += answer_all(model, processor, asked[at : at + batch], max_new_tokens)
    reference = TransformersReference(folder)
    inputs = [reference.inputs(question.sample.messages, _images(question)) for question in asked]
    expected = reference.answer(inputs, max_new_tokens, batch)
    return Agreement([(q.sample.id, a, b) for q, a, b in zip(asked, answers, expected, strict=True)])


def _images(question: Question) -> list[Any]:
    if any(part.kind != "image" for part in question.sample.media()):
        raise TesseraError(f"sample {question.sample.id} has a video: only images and text can be compared")
    return [decode(part, question.root, Limits(), VideoSampling()) for part in question.sample.media()]


class TransformersReference:
    """Answer by the model and processor that transformers loads from a folder.

    `apply_chat_template` of its processor writes the prompt, repeats the placeholders and preprocesses the images.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise TesseraError("comparing needs `transformers`", fix="pip install tessera-mm[hf]") from None
        transformers.utils.logging.disable_progress_bar()
        try:
            self.processor = load_processor(folder)
            self._model = _load_model(folder)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise TesseraError(
                f"transformers cannot load this folder: {first_line(error)}", where=str(folder)
            ) from error
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self._decode = tokenizer.batch_decode
        self._template = getattr(self.processor, "chat_template", None) or tokenizer.chat_template
        self._sees = tokenizer is not self.processor
        # Greedy, whatever the folder sets for sampling: only the end of an answer is taken from its settings.
        advised = self._model.generation_config
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=advised.eos_token_id, pad_token_id=advised.pad_token_id
        )

    @torch.no_grad()
    def answer(self, asked: Sequence[Mapping[str, Any]], max_new_tokens: int, batch: int) -> list[str]:
        """Return the answer to each result of `inputs`. Inputs of one shape form a batch, so nothing is padded."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, one in enumerate(asked):
            alike.setdefault(_shape(one), []).append(number)
        answers = [""] * len(asked)
        for numbers in alike.values():
            for at in range(0, len(numbers), batch):
                group = numbers[at : at + batch]
                joined = {key: torch.cat([asked[n][key] for n in group]) for key in asked[group[0]]}
                out = self._model.generate(**joined, max_new_tokens=max_new_tokens)
                tail = out[:, joined["input_ids"].shape[1] :]
                for number, text in zip(group, self._decode(tail, skip_special_tokens=True), strict=True):
                    answers[number] = text
        return answers

    def inputs(self, messages: Sequence[Message], images: Sequence[Any]) -> dict[str, Any]:
        """Return the inputs of the model. `images`: those of all messages, in order."""
        chat = self._formatted(messages, iter(images))
        made = self.processor.apply_chat_template(
            chat,
            chat_template=self._template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}

    def _formatted(self, messages: Sequence[Message], images: Any) -> list[dict[str, Any]]:
        """Return the messages in the form that the template can write.

        A template takes the content as a list of parts, as a string, or as either: the first form is taken in which all
        text appears in the prompt.
        """
        parts = [[_part(part, images) for part in message.parts] for message in messages]
        texts = [part["text"] for one in parts for part in one if part["type"] == "text"]
        for whole in (False, True) if self._sees else (True, False):
            chat = [
                {"role": message.role, "content": _joined(one) if whole and _only_text(one) else one}
                for message, one in zip(messages, parts, strict=True)
            ]
            try:
                prompt = self.processor.apply_chat_template(
                    chat, chat_template=self._template, add_generation_prompt=True, tokenize=False
                )
            except Exception:  # a template may do anything with what it does not expect
                continue
            if all(text.strip() in prompt for text in texts) and "{'type'" not in prompt:
                return chat
        raise TesseraError("the folder's chat template does not write these messages", where="chat_template")


def load_processor(folder: Path) -> Any:
    """Return the `AutoProcessor` of the folder.

    The video part of a processor needs torchvision. Without it the library refuses the whole processor, and the class
    is made here from its other parts.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder)
    except ImportError:
        if importlib.util.find_spec("torchvision") is not None:
            raise
    return _without_video(folder)


def _without_video(folder: Path) -> Any:
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder))]

    class WithoutVideo(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    parts = {
        "image_processor": lambda: AutoImageProcessor.from_pretrained(folder),
        "tokenizer": lambda: AutoTokenizer.from_pretrained(folder),
        "video_processor": lambda: None,
    }
    settings, _ = kind.get_processor_dict(folder)
    return WithoutVideo.from_args_and_dict([parts[name]() for name in kind.get_attributes()], settings)  # type: ignore[no-untyped-call]


def _load_model(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    named = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, named, None) or transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def _shape(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return names and shapes of all tensors, and the values of those that hold shapes themselves (grids, sizes)."""
    return tuple(
        (name, tuple(value.shape), tuple(value.flatten().tolist()) if "grid" in name or "size" in name else ())
        for name, value in sorted(inputs.items())
    )


def _part(part: Any, images: Any) -> dict[str, Any]:
    return {"type": "text", "text": part.value} if part.kind == "text" else {"type": "image", "image": next(images)}


def _only_text(parts: Sequence[Mapping[str, Any]]) -> bool:
    return all(part["type"] == "text" for part in parts)


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
