"""`tessera.train` and `tessera.resume`: a whole run from one call."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.checkpoint.ranks import Ranks
from tessera.checkpoint.run_files import CONFIG, RUN_FILE, find_file, saved_config
from tessera.core import dist, log
from tessera.core.config import dump_yaml
from tessera.core.errors import TesseraError, first_line
from tessera.core.files import read_json_mapping
from tessera.core.run_config import ModelSection, RunConfig, load_config
from tessera.core.run_paths import located, moved
from tessera.core.trust import Trust, check_trusted, find_code, named_code, remember
from tessera.data.side_files import SEAL, damaged_side_files
from tessera.train.build import build_trainer
from tessera.train.callbacks import Callback
from tessera.train.describe import describe, with_model_resolved
from tessera.train.first_weights import check_first_weights
from tessera.train.jsonl import read_metrics
from tessera.train.run_folder import Proof, RunFolder, check_fresh, writable


@dataclass(frozen=True)
class Run:
    """What a run leaves behind."""

    folder: Path
    checkpoint: Path | None
    stopped: str | None = None  # why it ended before its last step, if it did

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")


def train(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Trains from the start. A folder that already holds a run is left alone unless `overwrite` says otherwise."""
    config = load_config(recipe, overrides)
    check_fresh(config.folder, overwrite)  # again when the folder is locked; here before anything is built
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


def resume_config(run: str | Path, overrides: Mapping[str, Any] | None = None, trust: Trust = False) -> RunConfig:
    """The configuration that a run goes on with, from wherever it lies now and whatever the working folder is."""
    folder = Path(run)
    if folder.name in ("", ".."):
        folder = folder.resolve()
    kept = saved_config(folder)
    if kept is None:
        raise TesseraError(
            f"{folder} is not a run: it has no config.yaml", fix="name the folder that `tessera train` made"
        )
    kept["name"] = "run"  # a folder may have been given a name since that no recipe may have
    code = named_code(load_config(kept))
    check_trusted(find_file(folder, CONFIG).parent, code, trust)  # what `overrides` name, the user has said
    find_code(find_file(folder, CONFIG).parent, code)
    config = load_config(kept, overrides)
    if (was := _folder_before(folder)) is not None and was != folder.absolute():
        config = moved(config, was, folder.absolute())
    model = _with_own_copy(config.model, folder)
    # The folder may have been moved since: where it lies now counts, not where it lay.
    return config.model_copy(update={"out": folder.parent, "name": folder.name, "model": model})


def _with_own_copy(model: ModelSection, folder: Path) -> ModelSection:
    """A run reads its own copy of what lies beside the weights, should the first one be gone. A damaged copy would
    train on with another tokenizer or template: then the first one serves, if it is there."""
    copy = find_file(folder, "processor")
    if not copy.is_dir():
        return model
    damaged = damaged_side_files(copy)
    if not damaged:
        return model.model_copy(update={"tokenizer": folder / "processor"})
    first = model.tokenizer or model.path
    if first is not None and first.exists():
        log.logger().warning("%s of %s changed since the run began: %s is read again", ", ".join(damaged), copy, first)
        return model
    raise TesseraError(
        f"{', '.join(damaged)} changed since the run began: it would go on with other tokens",
        where=str(copy),
        fix=f"put the files back; if the change is meant, remove {copy / SEAL}",
    )


def _folder_before(folder: Path) -> Path | None:
    """Where a run lay when its configuration was written."""
    try:
        return Path(read_json_mapping(find_file(folder, RUN_FILE))["folder"])
    except (TesseraError, KeyError, TypeError):
        return None


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
        folder = RunFolder(config.folder)  # in the hands of the main rank
        try:
            Ranks.current().once(lambda: folder.open(overwrite=overwrite, resume=resume))
            config = located(with_model_resolved(config, described), Path.cwd())
            with writable(config.folder):
                log.setup(world.rank, config.folder / "logs")
                Ranks.current().once(lambda: folder.begin(config, resume=resume))
                if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once on every machine, each of which may resume the run
                    remember(config.folder, named_code(config))
                own = [Proof(folder)] if world.is_main else []
                trainer = build_trainer(config, described, world, [*callbacks, *own])
                if not (resume and trainer.resume()):
                    if resume:
                        log.logger().warning("%s has no checkpoint yet: starting from the beginning", config.folder)
                    trainer.begin()
                trainer.run()
            dist.barrier()  # whoever left earlier would look lost to ranks that have not ended their watch yet
            return Run(config.folder, trainer.checkpoints.newest, trainer.stop_reason)
        except RuntimeError as error:
            if not dist.is_peer_error(error):
                raise
            # While the parts are built no watch runs yet: this rank knows that a partner is gone, not which one.
            raise dist.RankFailure(
                f"another rank is gone: {first_line(error)}", fix="look at what the other ranks said"
            ) from error
        finally:
            folder.close()
            log.close()
