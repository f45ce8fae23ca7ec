"""Answer a file with a model: load what is needed, on one rank or several."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tessera.batch.answer import BatchResult, SampleAnswers, answer_file
from tessera.batch.bodies import BodyRows, is_request_file
from tessera.batch.rows import AnswerOptions, SampleRows
from tessera.checkpoint.files import MANIFEST
from tessera.config.trust import Trust
from tessera.core.spec import LanguageProcessor
from tessera.engine.engine import Engine
from tessera.engine.request import Sampling
from tessera.errors import TesseraError
from tessera.hub.config import local_model
from tessera.inference.load import AdapterPaths, adapter_strengths, load
from tessera.inference.prepare import PromptPool
from tessera.inference.weight_source import newest_checkpoint
from tessera.runtime import distributed as dist
from tessera.runtime.files import read_bytes


def generate_answers(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    root: str | Path | None = None,
    system: str | None = None,
    max_new_tokens: int | None = None,
    adapters: AdapterPaths | None = None,
    family: str | None = None,
    device: str = "auto",
    trust: Trust = False,
    overwrite: bool = False,
    seed: int = 0,
    **sampling: Any,
) -> BatchResult:
    """Answer every row of a file, and write the answers to `out` as JSON lines, in the order of the rows.

    `data`: a data set, or a file of requests in the form of OpenAI's batches. If the last message of a row is the
    assistant's, it is written as the expected answer. A row that cannot be used becomes a row with an error. If the
    process ends early, the same call continues. With a launcher such as torchrun the rows are split over ranks.

    `root`: folder of media; None: the folder of the data. `max_new_tokens` None: 256. `overwrite`: answer all rows
    again. `seed`: each row derives its own from it. `sampling`: temperature, top_k, top_p, min_p, repetition_penalty.
    In a file of requests each row sets its options: `system`, `max_new_tokens`, `adapters` and `sampling` are errors.
    Other arguments: see `load`.
    """
    folder, strengths = local_model(model), adapter_strengths(adapters)
    facts = {**model_facts(folder), "adapters": [[scale, model_facts(path)] for path, scale in strengths.items()]}
    if is_request_file(Path(data)):
        set_here = {"system": system, "max_new_tokens": max_new_tokens, **sampling, "adapter": adapters or None}
        _check_packages()
        _refuse_options([name for name, value in set_here.items() if value is not None])
        bodies = BodyRows.open(Path(data), None if root is None else Path(root), seed)
        from tessera.batch.service import service_answers  # late: needs packages of the server
        from tessera.server.start import ModelOptions

        model_options = ModelOptions(folder, device, family=family, trust=bool(trust))
        start = partial(service_answers, bodies, Path(out), model_options)
        with join_ranks(device) as world:
            facts |= bodies.facts()
            return answer_file(len(bodies), Path(out), facts, start, overwrite=overwrite, world=world)
    options = AnswerOptions(256 if max_new_tokens is None else max_new_tokens, Sampling(seed=seed, **sampling), system)
    rows = SampleRows.open(data, root, options)

    @contextlib.contextmanager
    def begin_engine() -> Iterator[SampleAnswers]:
        loaded, processor = load(folder, device=device, adapters=strengths, family=family, trust=trust)
        loaded.freeze()
        inner = processor.processor
        stop_tokens = frozenset(inner.stop_tokens) if isinstance(inner, LanguageProcessor) else frozenset()
        with PromptPool(processor) as prompts:
            yield SampleAnswers(rows, Engine(loaded), prompts, stop_tokens)

    with join_ranks(device) as world:
        facts |= rows.facts()
        return answer_file(len(rows), Path(out), facts, begin_engine, overwrite=overwrite, world=world)


def model_facts(folder: Path) -> dict[str, Any]:
    """Return JSON that changes whenever the weights of a model may have changed."""
    weights = folder if folder.is_file() else newest_checkpoint(folder) or folder
    if (weights / MANIFEST).is_file():
        content: Any = hashlib.sha256(read_bytes(weights / MANIFEST)).hexdigest()
    else:
        files = [weights] if weights.is_file() else sorted([*weights.glob("*.safetensors"), *weights.glob("*.json")])
        content = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"model": str(weights.resolve()), "weights": content}


def _check_packages() -> None:
    if find_spec("prometheus_client") is None:
        raise TesseraError(
            "packages are missing: prometheus-client",
            where="a file of requests",
            fix="pip install 'tessera-mm[serve]'",
            code="environment.no-server-packages",
        )


def _refuse_options(names: list[str]) -> None:
    if names:
        raise TesseraError(
            f"{names[0]} has no effect on a file of requests, where each row sets its own options",
            where=names[0],
            fix="set it in the rows, or leave it out",
            code="generation.option-without-effect",
        )


@contextlib.contextmanager
def join_ranks(device: str) -> Iterator[dist.World]:
    """Join the process group of a launcher. A single process needs none."""
    if dist.expected_world_size() == 1:
        yield dist.World(0, 1, 0, torch.device("cpu"))
    else:
        with dist.world(device) as world:
            yield world
