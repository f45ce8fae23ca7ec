"""What a model brings to an examination: its processor, the work of its towers, and what its recipe says of data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.checkpoint.origin import origin_of
from tessera.core.config import build, read_mapping
from tessera.core.run_config import DataSection, ParallelSection, RunConfig, SourceSection, load_config
from tessera.core.trust import Trust, check_trusted, model_code
from tessera.core.types import Processor
from tessera.data.kinds import Work
from tessera.train.build import build_processor
from tessera.train.describe import describe

RUN_CONFIG = "config.yaml"


@dataclass(frozen=True)
class ForModel:
    processor: Processor | None
    work: Work | None
    data: DataSection


def sets_of(names: Sequence[str]) -> list[SourceSection]:
    """Data sets as the command line names them: paths, also several in one word, a.json,b.json."""
    return build(DataSection, {"train": list(names)}, "data sets").train


def for_recipe(recipe: Path) -> ForModel:
    return _prepared(load_config(recipe))


def for_model(folder: Path, trust: Trust = False) -> ForModel:
    """A Hugging Face folder, a run, or one of its checkpoints. No weights are read."""
    if (folder / RUN_CONFIG).is_file():
        config = load_config(read_mapping(folder / RUN_CONFIG))
        check_trusted(folder, model_code(config.model), trust)
        run = folder.parent.parent if origin_of(folder) == "checkpoint" else folder
        if (run / "processor").is_dir():  # a run keeps its own copy, whatever became of the folder it began from
            config = config.model_copy(
                update={"model": config.model.model_copy(update={"tokenizer": run / "processor"})}
            )
        return _prepared(config)
    return _prepared(load_config({"model": {"path": folder}, "train": {"steps": 1}}))


def _prepared(config: RunConfig) -> ForModel:
    # How the model will be dealt out does not matter here, and this is one process.
    described = describe(config.model_copy(update={"parallel": ParallelSection()}), 1)
    processor = build_processor(config, described)
    training_on = getattr(processor, "training_on", None)
    if training_on is not None:
        processor = training_on(config.data.train_on, last_only=config.data.mask_history)
    work = described.spec.work
    if work is not None:
        work = functools.partial(work, described.config, training=described.training)
    return ForModel(processor, work, config.data)
