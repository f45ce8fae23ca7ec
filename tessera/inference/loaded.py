"""Use a loaded model: chat, generate, compute rewards, make prompts, and write it to a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tessera.checkpoint.state import model_tensors
from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.outputs import REWARDS
from tessera.core.sample import Sample
from tessera.core.spec import LanguageProcessor, ModelSpec, Processor
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, read_media
from tessera.diffusion.family import GenerationSpec
from tessera.diffusion.sampling.over_ranks import ModelOverRanks, PassRanks
from tessera.errors import TesseraError
from tessera.inference.chat import Chat
from tessera.inference.export import export_folder
from tessera.inference.generate import OwnGeneration, Sampling, TextStream, generate_tokens
from tessera.inference.messages import conversations, sample_of
from tessera.inference.proof import check_choice
from tessera.lora.export import save_adapters
from tessera.lora.select import Adapters


class LoadedModel(nn.Module):
    """Generate text with a model: `module` is the plain torch module, used with its processor."""

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        config: Section,
        processor: Processor | None,
        run: Callable[..., Any] | None = None,
        adapters: Adapters | None = None,
        base: Path | None = None,
        files: Path | None = None,
        limits: Limits | None = None,
        trained_whole: Sequence[str] = (),
    ) -> None:
        """Make the model. `run`: called instead of a module that is split over several ranks. `base`: the folder of the
        model that adapters belong to, if it is known. `files`: the folder of tokenizer and template.
        `trained_whole`: parameters that were trained beside adapters."""
        super().__init__()
        self.trained_whole = trained_whole
        self.adapters = adapters or {}
        self.base = base
        self.files = files
        self.module = module
        self._run: Any = module if run is None else run
        self.spec = spec
        self.config = config
        self._processor = processor
        self._limits = limits or Limits()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def passes(self) -> PassRanks:
        """Return the ranks that compute the passes of guidance in turn."""
        return self._run.passes if isinstance(self._run, ModelOverRanks) else PassRanks()

    def forward(self, batch: Batch, logits: bool = True) -> Any:
        """Return the outputs of the model by name."""
        # Only the language models of Tessera can leave out logits.
        options = {"logits": logits} if self.spec.task in ("language", "reward") else {}
        return self._run(batch.to(self.device), **options)

    def generate(
        self,
        batch: Batch,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> str | list[str]:
        """Return the answer to a prompt, or a list of answers to several.

        `on_text` is called with each new part of a single answer.
        """
        if self.spec.gives(REWARDS):
            raise TesseraError(
                "a reward model generates no text",
                fix="model.reward(batch) returns rewards of answers",
                code="generation.reward-model",
            )
        processor = _needed(self._processor, self.spec)
        rows = batch.segments["text"].bounds.numel() - 1
        stream = None if on_text is None else TextStream(processor.decode, on_text)
        if stream is not None and rows != 1:
            raise TesseraError(
                f"on_text follows one answer, and the batch has {rows} prompts",
                fix="pass one prompt",
                code="generation.stream-of-several",
            )
        generate = self.spec.generate
        answers = generate_tokens(
            self._run if generate is None else OwnGeneration(self.module, generate),
            batch.to(self.device),
            max_new_tokens=max_new_tokens,
            stop_tokens=processor.stop_tokens,
            sampling=Sampling(temperature, top_k, top_p, seed),
            on_token=None if stream is None else stream.add,
        )
        if stream is not None:
            stream.close()
        texts = [processor.decode(tokens) for tokens in answers]
        return texts[0] if rows == 1 else texts

    @torch.no_grad()
    def reward(self, batch: Batch) -> list[float]:
        """Return the reward of each conversation of a batch, by a reward model: higher is better."""
        if not self.spec.gives(REWARDS):
            raise TesseraError(
                "this model has no head for rewards", fix="train one: train.task=reward", code="model.no-reward-head"
            )
        outputs = self._run(batch.to(self.device), logits="last")
        return [float(value) for value in outputs[REWARDS].flatten()]

    def chat(
        self,
        text: str,
        image: Any = None,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        system: str | None = None,
        max_new_tokens: int = 512,
        on_text: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> str:
        """Return the answer to one question, with an image or several: `model.chat("What is this?", "cat.jpg")`.

        `sampling`: temperature, top_k, top_p, seed, as in `generate`. For several turns see `tessera.chat`.
        """
        processor = LoadedProcessor(self._processor, self.spec, self._limits)
        all_images = [*([] if image is None else [image]), *images]
        conversation = Chat(self, processor, system, max_new_tokens, sampling)
        return conversation.ask(text, images=all_images, videos=videos, on_text=on_text)

    def save(
        self,
        folder: str | Path,
        *,
        adapters: bool = False,
        overwrite: bool = False,
        prove: Literal["auto", "always", "never"] = "auto",
    ) -> Path:
        """Write the model with the weights it has now, and return the folder: a Hugging Face folder with tokenizer,
        template and preprocessor, which `transformers` and `tessera.load` read. Adapters are merged into the weights.

        `adapters`: write them alone, in PEFT's form. `prove`: whether logits are compared with those of transformers
        before the folder is published, as by `tessera.convert`. A folder with other files is refused unless `overwrite`
        is on.
        """
        check_choice(prove)
        target = Path(folder)
        if adapters:
            if not self.adapters:
                raise TesseraError(
                    "this model has no adapters",
                    where="adapters=True",
                    fix="leave it out",
                    code="adapter.none-in-model",
                )
            save_adapters(
                target,
                model_tensors(self.module),
                self.adapters,
                self.spec.main.weight_map(self.config),
                forms=["peft"],
                base="" if self.base is None else str(self.base),
                language=not isinstance(self.spec, GenerationSpec),
                reward=self.spec.gives(REWARDS),
                saved=self.trained_whole,
                overwrite=overwrite,
            )
            return target
        export_folder(
            self.module,
            self.spec,
            self.config,
            self._processor,
            target,
            files=self.files,
            base=self.base,
            adapters=self.adapters,
            overwrite=overwrite,
            prove=prove,
        )
        return target


@dataclass(frozen=True)
class LoadedProcessor:
    """Make prompts for generation from chat messages, or from samples of a data set."""

    processor: Processor | None
    spec: ModelSpec
    limits: Limits

    def __call__(self, messages: Sequence[Any], root: str | Path | None = None) -> Batch:
        """Return a batch for one conversation or a list of them, each a list of {role, content}.

        Images are paths, PIL images or bytes; videos are paths, bytes or arrays of frames. Relative paths start at
        `root`, or at the working folder.
        """
        base = Path.cwd() if root is None else Path(root)
        samples = [sample_of(talk, str(number), base) for number, talk in enumerate(conversations(messages))]
        return self.prompt([(sample, Path(base.anchor or "/")) for sample in samples])

    def whole(self, messages: Sequence[Any], root: str | Path | None = None) -> Batch:
        """Return a batch of conversations that end with an answer, as a reward model reads them."""
        base = Path.cwd() if root is None else Path(root)
        samples = [sample_of(talk, str(number), base) for number, talk in enumerate(conversations(messages))]
        processor = _needed(self.processor, self.spec)
        if not isinstance(processor, ChatProcessor):
            raise TesseraError(
                f"the processor of {self.spec.name} makes no batches of conversations",
                code="generation.no-conversations",
            )
        above = Path(base.anchor or "/")
        read = [read_media(sample, above, self.limits, processor) for sample in samples]
        encoded = [processor.encode(sample, *media) for sample, media in zip(samples, read, strict=True)]
        return processor.collate([encoded], sum(len(sample.tokens) for sample in encoded))

    def prompt(self, samples: Sequence[tuple[Sample, Path]]) -> Batch:
        """Return a batch for samples of data sets, each with the root folder of its media."""
        processor = _needed(self.processor, self.spec)
        if not isinstance(processor, ChatProcessor):  # it raises the reason why it makes no prompts
            return processor.prompt([sample for sample, _ in samples], [[] for _ in samples])
        read = [read_media(sample, root, self.limits, processor) for sample, root in samples]
        return processor.prompt(
            [sample for sample, _ in samples], [media for media, _ in read], [sizes for _, sizes in read]
        )


def _needed(processor: Processor | None, spec: ModelSpec) -> LanguageProcessor:
    if processor is not None and not isinstance(processor, LanguageProcessor):
        raise TesseraError(
            f"{spec.name} generates images or videos, not text",
            fix="use `tessera generate`",
            code="generation.model-generates-media",
        )
    if processor is None:
        raise TesseraError(
            f"no processor for this {spec.name} model: text cannot be tokenized",
            fix="put tokenizer.json and the preprocessor files beside the weights, or in the run's `processor` folder",
            code="tokenizer.no-processor",
        )
    return processor
