"""Leave frozen parameters out of checkpoints: record their folder with file hashes, and load them from there.

A frozen parameter that was filled from the folder of a published model never changes, so a checkpoint need not store it
again. Its `state.json` names the folder, the weight files with size and sha256, and the parameters. Loading checks the
files before it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tessera.checkpoint.files import FileRecord, hash_file, problems_in
from tessera.checkpoint.state import MODEL
from tessera.errors import TesseraError, few_names
from tessera.runtime.collective import Ranks
from tessera.weights.layouts import folder_layout

STATE_KEY = "frozen"  # key of the entry in `state.json`


@dataclass(frozen=True)
class FrozenSource:
    """Locate frozen weights that checkpoints leave out: the folder that contains them, and their names.

    `folder`: current path of the model's folder; None: the path in the checkpoint, and a new run stores all weights.
    `read` fills tensors from the folder. `names`: parameters that are frozen in this run and were read from the folder.
    """

    folder: Path | None
    read: Callable[[Path, Mapping[str, Tensor]], None]
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FrozenWeights:
    """Hold the names of parameters that a checkpoint does not store, and the folder and files that contain them."""

    folder: Path
    files: tuple[FileRecord, ...]  # names are relative to the folder
    names: frozenset[str]  # tensor names as in the checkpoint

    @staticmethod
    def of_source(ranks: Ranks, source: FrozenSource) -> FrozenWeights | None:
        """Return the weights that checkpoints of a new run leave out. Each rank hashes some of the files."""
        folder = source.folder
        if folder is None or not source.names:
            return None

        def hash_some() -> list[FileRecord]:
            paths = sorted(folder_layout(folder).weight_files())[ranks.rank :: ranks.world]
            return [replace(hash_file(path), name=str(path.relative_to(folder))) for path in paths]

        files = [record for records in ranks.on_all(hash_some) for record in records]
        names = frozenset(f"{MODEL}{name}" for name in source.names)
        return FrozenWeights(folder, tuple(sorted(files, key=lambda record: record.name)), names)

    @staticmethod
    def of_state(state: Mapping[str, Any], where: Path) -> FrozenWeights | None:
        """Read from `state.json` which weights a checkpoint leaves out; None if it stores all tensors."""
        if STATE_KEY not in state:
            return None
        try:
            entry = state[STATE_KEY]
            files = [FileRecord(name, int(f["size"]), str(f["sha256"])) for name, f in entry["files"].items()]
            return FrozenWeights(Path(entry["folder"]), tuple(files), frozenset(map(str, entry["names"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TesseraError(
                f"the entry {STATE_KEY!r} of the state is damaged: {error!r}",
                where=str(where),
                code="checkpoint.damaged-state",
            ) from None

    def dump(self) -> dict[str, Any]:
        """Return these fields as the JSON entry of `state.json`."""
        files = {record.name: {"size": record.size, "sha256": record.sha256} for record in self.files}
        return {"folder": str(self.folder), "files": files, "names": sorted(self.names)}

    def still_frozen(self, names: frozenset[str]) -> FrozenWeights | None:
        """Return these weights without parameters that are not in `names`, which later checkpoints store."""
        frozen = self.names & {f"{MODEL}{name}" for name in names}
        return replace(self, names=frozen) if frozen else None

    def checked_folder(self, ranks: Ranks, folder: Path | None, checkpoint: Path) -> Path:
        """Return the folder of the weights after checking its files. `folder`: its new path, if it was moved."""
        folder = folder or self.folder
        by_rank = ranks.on_all(lambda: problems_in(folder, self.files[ranks.rank :: ranks.world]))
        problems = [problem for of_rank in by_rank for problem in of_rank]
        if problems:
            what = f"in {folder} {few_names(problems, 5)}" if folder.is_dir() else f"{folder} does not exist"
            raise TesseraError(
                f"the checkpoint does not store frozen weights, and their folder has changed: {what}",
                where=str(checkpoint),
                fix=f"restore {self.folder}, or give its new path: `tessera resume RUN model.path=FOLDER`, or "
                "model.path in RUN/config.yaml for other commands",
                code="checkpoint.frozen-weights-moved",
            )
        return folder
