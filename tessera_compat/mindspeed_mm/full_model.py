"""Write the folder of a full model of which a job trains one part, such as the thinker of Qwen2.5-Omni.

The other parts (talker, vocoder) are copied from the folder that the job started from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tessera.checkpoint.forms import NativeTensors, SafetensorsForm
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError, nearest
from tessera.models import resolve
from tessera.tools.conversion import check_apart
from tessera.weights.layouts import folder_layout
from tessera.weights.map import Rule, WeightMap
from tessera_compat.mindspeed_mm.converted_folders import SAME_NAMES, JoinedFolders, native_of, write_folder

_PART = "thinker."  # prefix of the trained part's tensors in folders of full models


def with_other_parts(like: Path, target: Path, write: Callable[[Path], Path]) -> Path:
    """Write the trained part of a model and the other parts, copied from `like`, to `target`, and return the folder.

    `write`: writes the trained part to a folder and returns that folder.
    """
    spec, _ = resolve(ModelSection(path=like))
    full_model = getattr(spec.config, "full_model", None)
    if full_model is None or folder_layout(like).config().get("model_type") != full_model:
        return write(target)
    check_apart(target, like)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        _join(write(Path(folder) / "part"), like, target)
    return target


def _join(part: Path, like: Path, target: Path) -> None:
    """Write the tensors of `part`, and the tensors of other parts in `like`."""
    with SafetensorsForm(part) as trained, SafetensorsForm(like) as published:
        stored = published.tensors()
        names = {name if name in stored else _PART + name: name for name in trained.tensors()}
        differing = [name for name in stored if name.startswith(_PART) and name not in names]
        differing += [name for name in names if name not in stored]
        if differing:
            raise TesseraError(
                f"only one of the trained model and the folder {like} has the tensor {differing[0]}",
                where=str(like),
                nearest=nearest(differing[0], stored),
                fix="name the folder that the job started from",
                code="weights.parts-differ",
            )
        rules = [Rule(full, name) for full, name in names.items()]
        joined = JoinedFolders(published, native_of(trained, WeightMap(tuple(rules)), rules), set(names))
        shapes = {name: plan.shape for name, plan in joined.tensors().items()}
        write_folder(target, NativeTensors(joined, SAME_NAMES, shapes, {}), SAME_NAMES, like)
