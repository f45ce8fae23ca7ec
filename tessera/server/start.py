"""Load a model and start its engine for a server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tessera.config.hub_ids import hub_spelling
from tessera.config.reader import Section
from tessera.core.spec import LanguageProcessor
from tessera.engine.adapter_bank import AdapterBank
from tessera.engine.engine import Engine
from tessera.engine.scheduler import EngineLimits
from tessera.engine.thread import EngineThread
from tessera.errors import TesseraError
from tessera.inference.adapters import bank_of
from tessera.inference.answering import context_of
from tessera.inference.load import load
from tessera.inference.loaded import LoadedModel, LoadedProcessor
from tessera.inference.prepare import PromptPool
from tessera.inference.speech import Speaker, load_speaker, speaks
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.processing.transcription import Transcriber
from tessera.runtime.log import logger
from tessera.server.answers import EngineAccess
from tessera.server.metrics import Metrics
from tessera.server.one_by_one import OneByOne
from tessera.server.service import Service
from tessera.server.settings import Settings
from tessera.server.tokens import Tokens
from tessera.server.voice import NoTextEngine, Voice

_LENGTH = 32768  # context length of models whose configuration does not state it
_SLOTS = 8  # limit of adapters that are loaded at a time, unless --adapter names more
# Limit of the pixels in all frames of an animation. A slow core decodes 5 to 50 megapixels per second, and other
# prompts wait.
_ANIMATION_PIXELS = 200_000_000
_RECORDINGS = 16  # limit of answers for a model that answers one by one: half an hour of sound takes 230 MB
_LARGEST_RANK = 512  # limit of an adapter's rank: every slot takes the memory and time of the largest rank


@dataclass(frozen=True)
class ModelOptions:
    """State which model is served, and the limits of its engine."""

    path: Path
    device: str = "auto"
    dtype: str | None = None
    family: str | None = None
    trust: bool = False
    adapters: Mapping[str, Path] = field(default_factory=dict)  # served name -> folder of the adapter
    max_length: int | None = None  # None: the context of the model, or the room of the cache if that is smaller
    rows: int = 256
    blocks: int | None = None
    speak: bool = False  # whether to load the talker of the folder, too, which speaks answers
    codec: str | None = None  # folder of the codec of a model that speaks; None: the folder of the model contains it


def start_service(options: ModelOptions, settings: Settings) -> Service:
    """Load the model and its adapters, and start the engine. `settings.max_length` is replaced."""
    if speaks(options.path, options.trust, options.family):
        return _speech_service(options, settings)
    begun = time.perf_counter()
    logger().info(f"loading {hub_spelling(options.path)}")
    model, processor = load(options.path, options.device, options.dtype, family=options.family, trust=options.trust)
    model.freeze()
    inner = processor.processor
    if not isinstance(inner, LanguageProcessor):
        raise TesseraError(
            f"{model.spec.name} is not a language model with a tokenizer",
            where=hub_spelling(options.path),
            fix="name the folder of a language model; images and videos are made by tessera generate",
            code="generation.model-not-served",
        )
    logger().info(f"loaded in {time.perf_counter() - begun:.1f} s on {model.device}")
    talker = _talker(options, model)  # load it before the engine, whose cache takes the remaining memory
    if model.spec.generate is not None and isinstance(inner, Transcriber):
        _check_one_by_one("answers one request at a time", options, settings)
        # Not the context of the model, which limits each window of a recording: its windows have one limit together.
        settings = replace(settings, max_length=_LENGTH, max_requests=min(settings.max_requests, _RECORDINGS))
        if (window := context_of(model.config, "max_target_positions")) is not None:
            logger().info(f"context of each window of a recording: {window} tokens")
        logger().info(f"answers one request at a time; at most {settings.max_requests} are computed or wait")
        return _service(settings, OneByOne(model, inner), processor, options, model.spec.name)
    bank = _bank(model, options, settings)
    engine = Engine(model, EngineLimits(blocks=options.blocks, rows=options.rows), bank)
    for name, folder in options.adapters.items():
        engine.load_adapter(name, folder)
        logger().info(f"loaded the adapter {name} from {folder}")
    settings = replace(settings, max_length=_length(engine, model.config, options.max_length))
    service = _service(settings, EngineThread(engine), processor, options, model.spec.name)
    service.voice = None if talker is None else Voice(talker, bank)
    return service


def _speech_service(options: ModelOptions, settings: Settings) -> Service:
    """Return the service of a model that speaks and writes no text."""
    _check_one_by_one("speaks one text at a time", options, settings)
    if options.speak:
        raise _without_effect("--speak", "this model speaks texts, and writes no answers")
    speaker = load_speaker(
        options.path,
        options.device,
        options.dtype,
        codec=options.codec,
        family=options.family,
        trust=options.trust,
    )
    name = speaker.model.spec.name
    settings = replace(settings, max_length=context_of(speaker.model.config) or _LENGTH)
    processor = LoadedProcessor(speaker.model.processor, speaker.model.spec, speaker.limits)
    service = _service(settings, NoTextEngine(name), processor, options, name)
    service.voice = Voice(speaker)
    return service


def _talker(options: ModelOptions, model: LoadedModel) -> Speaker | None:
    """Return the talker that speaks the answers of a model; None without --speak."""
    if not options.speak:
        if options.codec is not None:
            raise _without_effect("--codec", "the model writes text")
        return None
    family = model.spec.speech_family
    if family is None:
        raise _without_effect("--speak", f"the family {model.spec.name} has no talker")
    speaker = load_speaker(
        options.path,
        options.device,
        options.dtype,
        codec=options.codec,
        family=family,
        trust=options.trust,
        answers=model,
    )
    logger().info(f"loaded the talker {speaker.model.spec.name}")
    return speaker


def _without_effect(option: str, reason: str) -> TesseraError:
    return TesseraError(
        f"{option} has no effect: {reason}",
        where=option,
        fix=f"leave {option} out",
        code="generation.option-without-effect",
    )


def _service(
    settings: Settings, engine: EngineAccess, processor: LoadedProcessor, options: ModelOptions, family: str
) -> Service:
    inner = processor.processor
    assert isinstance(inner, LanguageProcessor), "checked by the caller"
    adapters = {name: str(folder) for name, folder in options.adapters.items()}
    tokens = Tokens(inner)
    prompts = PromptPool(replace(processor, limits=replace(processor.limits, max_animation_pixels=_ANIMATION_PIXELS)))
    if isinstance(inner, ConversationProcessor) and inner.streams:
        prompts.start()  # start the worker processes before the first image arrives
    return Service(settings, engine, prompts, tokens, Metrics(), adapters, family)


def _check_one_by_one(reason: str, options: ModelOptions, settings: Settings) -> None:
    """Refuse options of the engine for a model that the engine cannot run."""
    changed = {
        "--adapter": bool(options.adapters),
        "--allow-adapters": settings.allow_adapters is not None,
        "--max-length": options.max_length is not None,
        "--rows": options.rows != ModelOptions.rows,
        "--blocks": options.blocks is not None,
        "--allow-priority": settings.allow_priority,
    }
    name = next((name for name in changed if changed[name]), None)
    if name is not None:
        raise TesseraError(
            f"{name} has no effect: this model {reason}",
            where=name,
            fix=f"leave {name} out"
            + ("; tessera convert merges adapters into a model" if name in ("--adapter", "--allow-adapters") else ""),
            code="generation.option-without-effect",
        )


def _bank(model: LoadedModel, options: ModelOptions, settings: Settings) -> AdapterBank | None:
    """Return the bank for adapters; None if the server has none and clients may not load any."""
    if not options.adapters and settings.allow_adapters is None:
        return None
    return bank_of(model, slots=max(_SLOTS, len(options.adapters)), rank=_LARGEST_RANK)


def _length(engine: Engine, config: Section, wanted: int | None) -> int:
    """Return the maximum number of tokens of prompt and answer together."""
    context = context_of(config) or wanted or _LENGTH
    room = engine.stats().blocks * engine.limits.block_size
    if wanted is not None and wanted > min(context, room):
        raise TesseraError(
            f"--max-length is {wanted}; the model has positions for {context} tokens, and the cache has room for "
            f"{room}",
            where="--max-length",
            fix="leave it out, or lower it",
            code="generation.length-too-large",
        )
    return min(context, room) if wanted is None else wanted
