"""A loaded model and its processor: generate, chat, compute rewards, and save the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from tessera.checkpoint.state import model_tensors
from tessera.config.reader import Section
from tessera.core.batch import Batch
from tessera.core.outputs import REWARDS
from tessera.core.sample import MediaSize, Sample
from tessera.core.spec import LanguageProcessor, ModelSpec, Processor
from tessera.data.media.files import Limits
from tessera.data.media.read import ChatProcessor, read_media
from tessera.diffusion.family import GenerationSpec
from tessera.diffusion.sampling.over_ranks import ModelOverRanks, PassRanks
from tessera.engine.model import GenerativeModel
from tessera.engine.offline import ConversationEngine, answers_to
from tessera.engine.request import Request, Sampling, check_new_tokens
from tessera.engine.text import AnswerText
from tessera.errors import TesseraError, with_fix
from tessera.inference.chat import Chat
from tessera.inference.export import export_folder
from tessera.inference.messages import conversations, sample_of
from tessera.inference.own_generation import OwnGeneration
from tessera.inference.proof import check_choice
from tessera.inference.sampling_options import sampling_of
from tessera.lora.export import save_adapters
from tessera.lora.select import Adapters
from tessera.models.processing.conversation import ConversationProcessor, PromptEnding


class LoadedModel(nn.Module):
    """Wrap a model with its processor. `module` is the plain torch module."""

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
        """Create the wrapper.

        `run`: callable to use instead of `module`, for a model that is split over ranks. `base`: folder of the base
        model, if the model has adapters. `files`: folder with tokenizer and chat template. `trained_whole`: names of
        parameters that were trained in full in addition to adapters."""
        super().__init__()
        self.over_ranks = run is not None
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

    def freeze(self) -> Self:
        """Freeze all weights of a model that is not trained, so that decoding may place some in adjacent memory."""
        self.module.requires_grad_(False)
        return self

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def processor(self) -> Processor | None:
        return self._processor

    @property
    def generator(self) -> GenerativeModel:
        """Return the callable that runs the model with a KV cache. Raise for models that an engine cannot run."""
        if self.spec.generate is not None:
            raise TesseraError(
                f"the engine for many requests cannot run models of the family {self.spec.name}, which have their own "
                "generation method",
                fix="ask one question at a time (tessera generate, tessera chat), or use a family that Tessera has",
                code="generation.model-generates-itself",
            )
        if self.spec.gives(REWARDS):
            raise _reward_model()
        if self.spec.task == "speech":
            raise _speaks(self.spec)
        if not isinstance(self._run, GenerativeModel):
            raise TesseraError(
                f"{self.spec.name} is not a language model with a KV cache",
                fix="name a language model",
                code="generation.model-without-cache",
            )
        return self._run

    @property
    def passes(self) -> PassRanks:
        """Return the ranks over which the forward passes of classifier-free guidance are distributed."""
        return self._run.passes if isinstance(self._run, ModelOverRanks) else PassRanks()

    def forward(self, batch: Batch, logits: bool = True) -> Any:
        """Return the outputs of the model as name -> tensor."""
        # Models for images and videos have no argument `logits`.
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
        turns: ConversationEngine | None = None,
    ) -> str | list[str]:
        """Generate the answer to one prompt, or a list of answers to several prompts.

        `on_text` is called with each new part of the answer, for one prompt only. The engine answers all prompts
        together; a class of another library answers with its own method (see `OwnGeneration`). Each prompt samples with
        a seed that follows from `seed` and its number (`Sampling.nth`). `turns`: an engine that reuses its KV
        cache for later prompts that begin in the same way; a class of another library ignores it.
        """
        if self.spec.gives(REWARDS):
            raise _reward_model()
        if self.spec.task == "speech":
            raise _speaks(self.spec)
        processor = _needed(self._processor, self.spec)
        rows = batch.segments["text"].bounds.numel() - 1
        if on_text is not None and rows != 1:
            raise TesseraError(
                f"on_text works with one prompt, and the batch has {rows}",
                fix="pass one prompt",
                code="generation.stream-of-several",
            )
        check_new_tokens(max_new_tokens)
        sampling = sampling_of(temperature, top_k, top_p, seed)
        if self.spec.generate is None:
            answers = answers_to(self, batch, processor.stop_tokens, max_new_tokens, sampling, on_text, turns)
            texts = [answer.text for answer in answers]
        else:
            texts = self._generate_itself(batch, processor, max_new_tokens, sampling, on_text)
        return texts[0] if rows == 1 else texts

    def _generate_itself(
        self,
        batch: Batch,
        processor: LanguageProcessor,
        max_new_tokens: int,
        sampling: Sampling,
        on_text: Callable[[str], None] | None,
    ) -> list[str]:
        """Generate with the method of a class of another library."""
        assert self.spec.generate is not None
        stream = AnswerText(Request(batch), processor.decode)
        answers = OwnGeneration(self.module, self.spec.generate).answer(
            batch.to(self.device),
            max_new_tokens=max_new_tokens,
            stop_tokens=processor.stop_tokens,
            sampling=sampling,
            on_token=None if on_text is None else lambda row, token: on_text(stream.add(token)[0]),
        )
        if on_text is not None:
            on_text(stream.close())
        return [processor.decode(tokens) for tokens in answers]

    @torch.no_grad()
    def reward(self, batch: Batch) -> list[float]:
        """Return the reward of each conversation in a batch. A higher reward is better."""
        if not self.spec.gives(REWARDS):
            raise TesseraError(
                "this model has no reward head",
                fix="train a reward model with train.task=reward",
                code="model.no-reward-head",
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
        audios: Sequence[Any] = (),
        system: str | None = None,
        max_new_tokens: int = 512,
        on_text: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> str:
        """Answer one question, with or without media: `model.chat("What is this?", "cat.jpg")`.

        `sampling`: temperature, top_k, top_p, seed, as in `generate`. See `tessera.chat` for several questions.
        """
        processor = LoadedProcessor(self._processor, self.spec, self._limits)
        all_images = [*([] if image is None else [image]), *images]
        conversation = Chat(self, processor, system, max_new_tokens, sampling)
        return conversation.ask(text, images=all_images, videos=videos, audios=audios, on_text=on_text)

    def save(
        self,
        folder: str | Path,
        *,
        adapters: bool = False,
        overwrite: bool = False,
        prove: Literal["auto", "always", "never"] = "auto",
    ) -> Path:
        """Save the model as a Hugging Face folder for `transformers` and `tessera.load`, and return the folder.

        Tokenizer, chat template and preprocessor are saved, too. Adapters are merged into the weights. `adapters`: save
        only the adapters, in PEFT's format. `prove`: whether to compare logits with transformers before the folder is
        published, as in `tessera.convert`. A folder that contains other files is refused unless `overwrite` is True.
        """
        check_choice(prove)
        target = Path(folder)
        if adapters:
            if not self.adapters:
                raise TesseraError(
                    "this model has no adapters",
                    where="adapters=True",
                    fix="leave adapters=True out",
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
                takes_tokens=self.spec.stock_inputs is None,
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
    """Create prompts for generation from chat messages, or from samples of a data set."""

    processor: Processor | None
    spec: ModelSpec
    limits: Limits

    def __call__(self, messages: Sequence[Any], root: str | Path | None = None) -> Batch:
        """Return a batch for one conversation or several. A conversation is a list of {role, content}.

        Images are paths, PIL images or bytes; videos are paths, bytes or arrays of frames; audios are paths, bytes or
        {"array": samples, "sampling_rate": 16000}. Relative paths are relative to `root`; None: to the working folder.
        """
        base = Path.cwd() if root is None else Path(root)
        samples = [sample_of(talk, str(number), base) for number, talk in enumerate(conversations(messages))]
        return self.prompt([(sample, Path(base.anchor or "/")) for sample in samples])

    def whole(self, messages: Sequence[Any], root: str | Path | None = None) -> Batch:
        """Return a batch of complete conversations, which end with an answer, for a reward model."""
        base = Path.cwd() if root is None else Path(root)
        samples = [sample_of(talk, str(number), base) for number, talk in enumerate(conversations(messages))]
        processor = _needed(self.processor, self.spec)
        if not isinstance(processor, ChatProcessor):
            raise TesseraError(
                f"the processor of {self.spec.name} cannot process complete conversations",
                fix="use a family with conversations: docs/how-to/add-a-model-family.md",
                code="generation.no-conversations",
            )
        above = Path(base.anchor or "/")
        read = [self._media(sample, above, processor) for sample in samples]
        encoded = [processor.encode(sample, *media) for sample, media in zip(samples, read, strict=True)]
        return processor.collate([encoded], sum(len(sample.tokens) for sample in encoded))

    def prompt(
        self, samples: Sequence[tuple[Sample, Path]], ending: PromptEnding = "answer", frames: int | None = None
    ) -> Batch:
        """Return a batch of prompts for (sample of a data set, root folder of its media).

        `ending`: see `ConversationProcessor.prompt`. `frames`: number of frames to sample from each video; None: as the
        processor does.
        """
        processor = _needed(self.processor, self.spec)
        if frames is not None:
            processor = self._sampling(frames)
        if not isinstance(processor, ChatProcessor):  # it takes no conversations: its `prompt` raises the reason
            return processor.prompt([sample for sample, _ in samples], [[] for _ in samples])
        read = [self._media(sample, root, processor) for sample, root in samples]
        items, media, sizes = [sample for sample, _ in samples], [m for m, _ in read], [s for _, s in read]
        if ending == "answer":
            return processor.prompt(items, media, sizes)
        if not isinstance(processor, ConversationProcessor):
            raise TesseraError(
                f"the processor of {self.spec.name} cannot continue an answer",
                fix="end the conversation with a message of the user",
                code="generation.cannot-continue-answer",
            )
        return processor.prompt(items, media, sizes, ending)

    def _sampling(self, frames: int) -> LanguageProcessor:
        """Return a processor that samples `frames` frames from each video."""
        if not isinstance(self.processor, ConversationProcessor):
            raise TesseraError(
                f"the processor of {self.spec.name} chooses the number of frames itself",
                fix="leave the number of frames out",
                code="generation.option-without-effect",
            )
        return replace(self.processor, sampling=replace(self.processor.sampling, frames=frames))

    def _media(self, sample: Sample, root: Path, processor: ChatProcessor) -> tuple[list[Any], list[MediaSize]]:
        with with_fix("media of the conversation", "use a file that exists and can be decoded"):
            return read_media(sample, root, self.limits, processor)


def _reward_model() -> TesseraError:
    return TesseraError(
        "a reward model cannot generate text",
        fix="compute rewards of answers with model.reward(batch)",
        code="generation.reward-model",
    )


def _speaks(spec: ModelSpec) -> TesseraError:
    return TesseraError(
        f"{spec.name} speaks, and writes no text",
        fix='write its speech to a file: tessera generate MODEL "Good evening." -o hello.wav',
        code="generation.model-speaks",
    )


def _needed(processor: Processor | None, spec: ModelSpec) -> LanguageProcessor:
    if processor is not None and not isinstance(processor, LanguageProcessor):
        raise TesseraError(
            f"{spec.name} is a model for images or videos, and cannot generate text",
            fix="use tessera generate, or tessera.pipeline in Python",
            code="generation.model-generates-media",
        )
    if processor is None:
        raise TesseraError(
            f"the folder of this {spec.name} model has no tokenizer or preprocessor",
            fix="copy tokenizer.json and the preprocessor files into that folder, for a run into RUN/processor",
            code="tokenizer.no-processor",
        )
    return processor
