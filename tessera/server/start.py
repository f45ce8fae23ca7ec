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
from tessera.inference.loaded import LoadedModel
from tessera.inference.prepare import PromptPool
from tessera.models.processing.conversation import ConversationProcessor
from tessera.runtime.log import logger
from tessera.server.metrics import Metrics
from tessera.server.service import Service
from tessera.server.settings import Settings
from tessera.server.tokens import Tokens

_LENGTH = 32768  # context of models whose configuration does not state it
_SLOTS = 8  # adapters that may be loaded at a time
# Of all frames of an animation. A slow core decodes 5 to 50 megapixels a second, and other prompts wait meanwhile.
_ANIMATION_PIXELS = 200_000_000
_LARGEST_RANK = 512  # the memory and time of every slot follow the largest rank


@dataclass(frozen=True)
class ModelOptions:
    """State which model is served, and the limits of its engine."""

    path: Path
    device: str = "auto"
    dtype: str | None = None
    family: str | None = None
    trust: bool = False
    adapters: Mapping[str, Path] = field(default_factory=dict)  # served name -> folder of the adapter
    max_length: int | None = None  # None: the context of the model, or what the cache holds
    rows: int = 256
    blocks: int | None = None


def start_service(options: ModelOptions, settings: Settings) -> Service:
    """Load the model and its adapters, and start the engine. `settings.max_length` is replaced."""
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
    engine = Engine(model, EngineLimits(blocks=options.blocks, rows=options.rows), _bank(model, options, settings))
    for name, folder in options.adapters.items():
        engine.load_adapter(name, folder)
        logger().info(f"loaded the adapter {name} from {folder}")
    settings = replace(settings, max_length=_length(engine, model.config, options.max_length))
    adapters = {name: str(folder) for name, folder in options.adapters.items()}
    tokens = Tokens(inner)
    prompts = PromptPool(replace(processor, limits=replace(processor.limits, max_animation_pixels=_ANIMATION_PIXELS)))
    if isinstance(inner, ConversationProcessor) and inner.streams:
        prompts.start()  # before the first image arrives
    return Service(settings, EngineThread(engine), prompts, tokens, Metrics(), adapters, model.spec.name)


def _bank(model: LoadedModel, options: ModelOptions, settings: Settings) -> AdapterBank | None:
    """Return a bank for adapters, or None if there can be none."""
    if not options.adapters and settings.allow_adapters is None:
        return None
    return bank_of(model, slots=max(_SLOTS, len(options.adapters)), rank=_LARGEST_RANK)


def _length(engine: Engine, config: Section, wanted: int | None) -> int:
    """Return the number of tokens of prompt and answer together."""
    context = context_of(config) or wanted or _LENGTH
    room = engine.stats().blocks * engine.limits.block_size
    if wanted is not None and wanted > min(context, room):
        raise TesseraError(
            f"--max-length is {wanted}; the model has positions for {context} tokens, and the cache room for {room}",
            where="--max-length",
            fix="leave it out, or lower it",
            code="generation.length-too-large",
        )
    return min(context, room) if wanted is None else wanted
