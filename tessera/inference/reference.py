"""Reference models for comparisons: a folder loaded by `transformers` or `diffusers` themselves."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.core.sample import Message, Part
from tessera.errors import TesseraError, first_line
from tessera.models.transformers.library import chat_template, load_processor
from tessera.models.transformers.rendering import TemplateLimit, render
from tessera.runtime.log import without_bars
from tessera.weights.layouts import CLASS_NAME, ROOT, folder_layout

_FAULTS = ("load this folder", "compute with this folder")


class UnreadableError(TesseraError):
    """Report that transformers or diffusers cannot load or run the model of a folder, and no package is missing."""


class _Loaded:
    """Load the model of a folder in float32 by the class that its config.json names."""

    library = ""

    def __init__(self, folder: Path, kind: Any, **options: Any) -> None:
        self._folder = folder
        with self._errors("load this folder"), without_bars(importlib.import_module(self.library)):
            self.model, report = kind.from_pretrained(
                folder, output_loading_info=True, trust_remote_code=False, local_files_only=True, **options
            )
        self.model.eval()
        self.missing = sorted(report["missing_keys"])
        self.unexpected = sorted(report["unexpected_keys"])

    def _errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _their_errors(self._folder, what, self.library)


class StockModel(_Loaded):
    """Load the model of a folder by its class of transformers."""

    library = "transformers"

    def __init__(self, folder: Path) -> None:
        import transformers

        super().__init__(folder, self.class_of(folder) or transformers.AutoModelForCausalLM, dtype=torch.float32)

    @staticmethod
    def class_of(folder: Path) -> Any:
        """Return the class; None if transformers has none of that name."""
        import transformers

        named = folder_layout(folder).config().get("architectures")
        name = str(named[0]) if isinstance(named, list) and named else ""
        return _class_named(transformers, name, transformers.PreTrainedModel)

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the logits of one prompt, [tokens, vocabulary]."""
        with self._errors("compute with this folder"):
            logits: Tensor = self.model(**in_float32(inputs)).logits[0]
        return logits


class DiffusersModel(_Loaded):
    """Load the transformer of a folder by its class of diffusers."""

    library = "diffusers"

    def __init__(self, folder: Path) -> None:
        inner = folder_layout(folder).component_folder(ROOT)
        super().__init__(inner, self.class_of(folder), torch_dtype=torch.float32, use_safetensors=True)

    @staticmethod
    def class_of(folder: Path) -> Any:
        """Return the class; None if diffusers has none of that name."""
        import diffusers

        return _class_named(diffusers, str(folder_layout(folder).config().get(CLASS_NAME)), diffusers.ModelMixin)

    @torch.no_grad()
    def predict(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the prediction for one sample: tokens [n, values], or an image or a video with channels."""
        with self._errors("compute with this folder"):
            latents: Tensor = self.model(**inputs, return_dict=False)[0][0]
        return latents


def _class_named(library: Any, name: str, base: type) -> Any:
    """Return the class of a library with this name and base; None if there is none."""
    named = getattr(library, name, None)
    return named if isinstance(named, type) and issubclass(named, base) else None


class TransformersReference(StockModel):
    """Generate answers with the model and the processor that transformers loads from a folder.

    `apply_chat_template` of the processor renders the prompt, repeats placeholders and preprocesses media.
    """

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise TesseraError(
                "the comparison needs the package transformers",
                fix="pip install tessera-mm[hf]",
                code="environment.no-transformers",
            )
        import transformers

        with _their_errors(folder, "load this folder"):
            self.processor = load_processor(folder)
        super().__init__(folder)
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self._decode = tokenizer.batch_decode
        self._template = chat_template(self.processor, tokenizer) or ""
        self._special = tokenizer.special_tokens_map
        self._sees = tokenizer is not self.processor
        # Greedy decoding. Only the stop and padding tokens are taken from the generation settings of the folder.
        advised = self.model.generation_config
        self.model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=advised.eos_token_id, pad_token_id=advised.pad_token_id
        )

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[Mapping[str, Any]],
        max_new_tokens: int,
        batch: int,
        count: Callable[[int], None] = lambda done: None,
    ) -> list[str]:
        """Return the answers to prompts from `inputs`. Only prompts of equal shape share a batch, to avoid padding.

        `count` is called with the number of answers of each batch.
        """
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, prompt in enumerate(prompts):
            alike.setdefault(_shape(prompt), []).append(number)
        answers = [""] * len(prompts)
        for numbers in alike.values():
            for at in range(0, len(numbers), batch):
                group = numbers[at : at + batch]
                joined = {key: torch.cat([prompts[n][key] for n in group]) for key in prompts[group[0]]}
                with _their_errors(self._folder, "answer these messages"):
                    out = self.model.generate(**in_float32(joined), max_new_tokens=max_new_tokens)
                tail = out[:, joined["input_ids"].shape[1] :]
                for number, text in zip(group, self._decode(tail, skip_special_tokens=True), strict=True):
                    answers[number] = text
                count(len(group))
        return answers

    def inputs(self, messages: Sequence[Message], media: Sequence[Any]) -> dict[str, Any]:
        """Return model inputs for a conversation. `media`: the images and recordings of all messages, in order."""
        chat = self._formatted(messages, iter(media))
        with _their_errors(self._folder, "prepare these messages"):
            inputs = self.processor.apply_chat_template(
                chat,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        return {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}

    def _formatted(self, messages: Sequence[Message], media: Iterator[Any]) -> list[dict[str, Any]]:
        """Return the messages in a form that the chat template supports.

        Some templates expect the content as a list of parts, others as a string. Use the first form for which all texts
        appear in the prompt.
        """
        parts = [[_part(part, media) for part in message.parts] for message in messages]
        texts = [part["text"] for content in parts for part in content if part["type"] == "text"]
        for whole in (False, True) if self._sees else (True, False):
            chat = [
                {"role": message.role, "content": _joined(content) if whole and _only_text(content) else content}
                for message, content in zip(messages, parts, strict=True)
            ]
            try:  # render in a separate process first: the template is untrusted code
                where = f"chat_template of {self._folder}"
                prompt = render(self._template, chat, self._special, answer=True, where=where)
            except TemplateLimit:
                raise
            except TesseraError:  # the template does not support this form
                continue
            if all(text.strip() in prompt for text in texts) and "{'type'" not in prompt:
                return chat
        raise TesseraError(
            "the chat template of the folder does not render the texts of the messages",
            where="chat_template",
            code="tokenizer.template-refuses-messages",
        )


@contextlib.contextmanager
def _their_errors(folder: Path, what: str, library: str = "transformers") -> Iterator[None]:
    """Convert any exception of a library into a `TesseraError`."""
    try:
        yield
    except Exception as error:
        kind = UnreadableError if what in _FAULTS and not isinstance(error, ImportError) else TesseraError
        message = f"{library} cannot {what}: {first_line(error)}"
        raise kind(message, where=str(folder), code="weights.reference-fails") from error


def in_float32(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return model inputs as float32: some processors return pixels in bfloat16 (Llama 4)."""
    return {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}


def _shape(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for prompts that can share a batch: shapes of tensors, values of grids and sizes."""
    return tuple(
        (name, tuple(value.shape), tuple(value.flatten().tolist()) if "grid" in name or "size" in name else ())
        for name, value in sorted(inputs.items())
    )


def _part(part: Part, media: Iterator[Any]) -> dict[str, Any]:
    return {"type": part.kind, part.kind: part.value if part.kind == "text" else next(media)}


def _only_text(parts: Sequence[Mapping[str, Any]]) -> bool:
    return all(part["type"] == "text" for part in parts)


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
