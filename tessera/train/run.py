"""`tessera.train` and `tessera.resume`: a whole run from one call."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.core import dist, log
from tessera.core.config import dump_yaml, read_mapping
from tessera.core.errors import TesseraError, first_line
from tessera.core.run_config import RunConfig, load_config
from tessera.core.trust import Trust, check_trusted, named_code
from tessera.train.build import build_trainer, run_exists
from tessera.train.callbacks import Callback
from tessera.train.describe import describe
from tessera.train.first_weights import check_first_weights
from tessera.train.jsonl import read_jsonl


@dataclass(frozen=True)
class Run:
    """What a run leaves behind."""

    folder: Path
    checkpoint: Path | None
    stopped: str | None = None  # why it ended before its last step, if it did

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "metrics.jsonl"))


def train(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Trains from the start. A folder that already holds a run is left alone unless `overwrite` says otherwise."""
    config = load_config(recipe, overrides)
    check_fresh(config, overwrite)
    return _run(config, resume=False, overwrite=overwrite, callbacks=callbacks)


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    trust: Trust = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Goes on from the newest good checkpoint of a run; its own saved configuration is all that is needed.

    `trust`: a folder that you did not make may name code to import and call; True says that you trust it, a set of
    import paths that you trust these."""
    return _run(resume_config(run, overrides, trust), resume=True, overwrite=False, callbacks=callbacks)


def check_fresh(config: RunConfig, overwrite: bool) -> None:
    if run_exists(config.folder) and not overwrite:
        raise TesseraError(
            f"{config.folder} already holds a run with checkpoints",
            where="out, name",
            fix=f"`tessera resume {config.folder}` goes on with it; name=NEW starts another; --overwrite replaces it",
        )


def resume_config(run: str | Path, overrides: Mapping[str, Any] | None = None, trust: Trust = False) -> RunConfig:
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise TesseraError(
            f"{folder} is not a run: it has no config.yaml", fix="name the folder that `tessera train` made"
        )
    # The folder may have been moved since: where it lies now counts, not where it lay.
    placed = {"out": str(folder.parent), "name": folder.name}
    if (folder / "processor").is_dir():
        placed["model.tokenizer"] = str(folder / "processor")  # its own copy, should the first one be gone
    kept = read_mapping(folder / "config.yaml")
    check_trusted(folder, named_code(load_config(kept)), trust)  # what `overrides` name, the user has said
    return load_config(kept, {**(overrides or {}), **placed})


def fingerprint(config: RunConfig) -> str:
    """Short, and the same only for the same configuration: ranks compare it when they meet."""
    return hashlib.sha256(dump_yaml(config).encode()).hexdigest()[:12]


def join(config: RunConfig) -> AbstractContextManager[dist.World]:
    """The world that a recipe's ranks meet in, after they have compared versions, configuration and run folder."""
    return dist.world(
        config.train.device,
        config.parallel.timeout_s,
        join_timeout_s=config.parallel.join_timeout_s,
        config=fingerprint(config),
        folder=config.folder,
    )


def _run(config: RunConfig, *, resume: bool, overwrite: bool, callbacks: Sequence[Callback]) -> Run:
    described = describe(config, dist.coming_size())  # what cannot work should fail before any rank waits for another
    if not resume:
        check_first_weights(config, described)
    with join(config) as world:
        if overwrite and world.is_main and run_exists(config.folder):
            shutil.rmtree(config.folder)
        dist.barrier()
        log.setup(world.rank, config.folder / "logs")
        try:
            trainer = build_trainer(config, described, world, callbacks)
            if not (resume and trainer.resume()):
                if resume:
                    log.logger().warning("%s has no checkpoint yet: starting from the beginning", config.folder)
                trainer.begin()
            trainer.run()
            return Run(config.folder, trainer.checkpoints.latest(), trainer.stop_reason)
        except RuntimeError as error:
            if not dist.is_peer_error(error):
                raise
            # While the parts are built no watch runs yet: this rank knows that a partner is gone, not which one.
            raise dist.RankFailure(
                f"another rank is gone: {first_line(error)}", fix="look at what the other ranks said"
            ) from error
        finally:
            log.close()
