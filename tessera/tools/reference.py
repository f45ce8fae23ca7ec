"""A folder as plain `transformers` reads it: its own model class, processor and chat template."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera.core.errors import TesseraError, first_line
from tessera.core.types import Message


class Reference:
    """Messages and pictures go to `apply_chat_template` of the library's own processor for the folder: it writes the
    prompt, repeats the placeholders, makes pixels of pictures, and its model answers greedily."""

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
        # Greedy, whatever a folder advises for sampling (temperature, penalties): only where an answer ends is taken.
        advised = self._model.generation_config
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=advised.eos_token_id, pad_token_id=advised.pad_token_id
        )

    @torch.no_grad()
    def answer(self, asked: Sequence[Mapping[str, Any]], max_new_tokens: int, batch: int) -> list[str]:
        """To each of what `inputs` gave. Alike ones together: without padding each is answered as it would be alone."""
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

    def inputs(self, messages: Sequence[Message], pictures: Sequence[Any]) -> dict[str, Any]:
        """What the model takes, made by the processor. `pictures`: those of all messages, in order."""
        said = self._written(messages, iter(pictures))
        made = self.processor.apply_chat_template(
            said,
            chat_template=self._template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}

    def _written(self, messages: Sequence[Message], pictures: Any) -> list[dict[str, Any]]:
        """Templates take what is said as a list of parts, as a string, or as either: the first way in which all of it
        comes to stand in the prompt."""
        parts = [[_part(part, pictures) for part in message.parts] for message in messages]
        texts = [part["text"] for one in parts for part in one if part["type"] == "text"]
        for whole in (False, True) if self._sees else (True, False):
            said = [
                {"role": message.role, "content": _joined(one) if whole and _only_text(one) else one}
                for message, one in zip(messages, parts, strict=True)
            ]
            try:
                prompt = self.processor.apply_chat_template(
                    said, chat_template=self._template, add_generation_prompt=True, tokenize=False
                )
            except Exception:  # a template may do anything with what it does not expect
                continue
            if all(text.strip() in prompt for text in texts) and "{'type'" not in prompt:
                return said
        raise TesseraError("the folder's chat template does not write these messages", where="chat_template")


def load_processor(folder: Path) -> Any:
    """`AutoProcessor` of the folder. The video half of a processor needs torchvision; where that is not installed the
    library refuses the whole, and its own class is made here from its other parts, without that half."""
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


@dataclass(frozen=True)
class _Key:
    name: str
    shape: tuple[int, ...]
    values: tuple[int, ...]


def _shape(inputs: Mapping[str, Any]) -> tuple[_Key, ...]:
    """Of every tensor its shape; of those that say shapes themselves (grids, sizes) also what they say."""
    return tuple(
        _Key(name, tuple(value.shape), tuple(value.flatten().tolist()) if "grid" in name or "size" in name else ())
        for name, value in sorted(inputs.items())
    )


def _part(part: Any, pictures: Any) -> dict[str, Any]:
    return {"type": "text", "text": part.value} if part.kind == "text" else {"type": "image", "image": next(pictures)}


def _only_text(parts: Sequence[Mapping[str, Any]]) -> bool:
    return all(part["type"] == "text" for part in parts)


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
