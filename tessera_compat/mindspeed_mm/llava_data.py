"""Write LLaVA-Instruct rows in the `mllm` format of MindSpeed-MM."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from tessera.config.run_config import SourceSection
from tessera.core.sample import Sample
from tessera.data.media.files import folder_of
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import open_source
from tessera.errors import TesseraError
from tessera.tools.data_convert import Converted, write_rows


def convert_llava(
    annotations: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    folder: str = "train2017",
    check_images: bool = True,
    overwrite: bool = False,
) -> Converted:
    """Write LLaVA-Instruct rows about COCO images in the `mllm` format: a JSON array of

        {"images": ["./data/COCO2017/train2017/000000033471.jpg"], "messages": [{"role": "user", ...}, ...]}

    `images`: the folder that contains `folder`. Written paths begin with it; in the example it is `data/COCO2017`. Rows
    without an image have an empty list. Rows with a missing image are skipped and counted, unless `check_images` is
    False.
    """
    base = Path(images)
    relative = not base.is_absolute() and ".." not in base.parts  # the reader of data sets refuses paths with '..'
    prefix = f"./{base / folder}" if relative else os.path.abspath(base / folder)
    if check_images and not (base / folder).is_dir():
        raise TesseraError(
            f"{base} does not contain the folder {folder!r}",
            where="images",
            fix="name the folder that unpacking COCO2017 created",
            code="data.no-image-folder",
        )

    @functools.cache  # list a folder once, instead of checking each of 100,000 files
    def names_in(inner: str) -> frozenset[str]:
        here = base / folder / inner
        return frozenset(os.listdir(here)) if here.is_dir() else frozenset()

    def row_of(sample: Sample) -> dict[str, Any]:
        row = _mllm_row(sample, prefix)
        for path in row["images"] if check_images else ():
            inner, _, name = path.removeprefix(f"{prefix}/").rpartition("/")
            if inner.startswith("/") or ".." in Path(inner).parts or name not in names_in(inner):
                raise RecordError(f"no such image: {path}", where=sample.id, code="media.no-such-file")
        return row

    source = open_source(SourceSection(path=Path(annotations), format="llava", root=base if base.is_dir() else None))
    done = write_rows(source, out, overwrite, row_of, begin="[", between=",\n", end="]\n")
    if (base / folder).is_dir() and not _is_found_from(done.out, prefix):
        done.root = Path.cwd() if relative else Path(prefix).parent
    return done


def _is_found_from(out: Path, images: str) -> bool:
    """Return whether `images` is below the folder of the data set file `out`, which then needs no setting `root`."""
    try:
        return folder_of(images, out.parent) is not None
    except TesseraError:
        return False


def _mllm_row(sample: Sample, prefix: str) -> dict[str, Any]:
    images: list[str] = []
    messages: list[dict[str, str]] = []
    for message in sample.messages:
        if message.role not in ("user", "assistant"):
            what = f"a message has the role {message.role!r}: the mllm format has user and assistant only"
            raise RecordError(what, where=sample.id, code="data.not-in-mllm-format")
        text = ""
        for part in message.parts:
            if part.kind == "image" and isinstance(part.value, str):
                images.append(f"{prefix}/{part.value}")
                text += "<image>"
            elif part.kind == "text":
                text += part.value
            else:
                what = f"a part is {part.kind}: the mllm format has text and image files only"
                raise RecordError(what, where=sample.id, code="data.not-in-mllm-format")
        messages.append({"role": message.role, "content": text})
    return {"images": images, "messages": messages}
