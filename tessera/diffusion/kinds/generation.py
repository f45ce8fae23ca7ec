"""Read images and videos with captions for a generation model, from media files or from stored features."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from tessera.core.row_source import RowSource
from tessera.data.kinds import RowRequest
from tessera.data.kinds.chat import pack_rows, with_format
from tessera.data.order.packed_rows import PackedRows
from tessera.diffusion.feature_folder import MANIFEST, FeatureManifest, StoredSample, empty_caption
from tessera.diffusion.processor import GenerationProcessor
from tessera.errors import TesseraError

log = logging.getLogger("tessera")
COUNTS = ("samples", "tokens", "latents", "text", "trained", "images", "frames")


def generation_processor_of(request: RowRequest) -> GenerationProcessor:
    """Return the processor of a request; raise if it does not belong to a generation family."""
    if not isinstance(request.processor, GenerationProcessor):
        raise TesseraError(
            f"{type(request.processor).__name__} does not read images and videos with captions",
            where=f"data.kind={request.section.kind}",
            fix="use a family that generates images or videos, such as wan; or data.kind=chat",
            code="data.kind-needs-generation-model",
        )
    return request.processor


def captioned_rows(request: RowRequest, processor: GenerationProcessor) -> RowSource:
    """Return the rows of media files with captions, or of stored features."""
    section = request.section
    for key, plain in (("truncate", "never"), ("train_on", ["assistant"]), ("mask_history", False)):
        if getattr(section, key) != plain:
            raise TesseraError(
                f"{key} applies to turns of conversations and has no effect on captions",
                where=f"data.{key}",
                fix=f"leave data.{key} out",
                code="data.key-of-conversations",
            )
    sets = section.train if request.split == "train" else section.eval
    features = [source.path for source in sets if (source.path / MANIFEST).is_file()]
    for path in features:
        processor.check_features(FeatureManifest.read(path).facts, str(path))
    if features and len(features) < len(sets):
        raise TesseraError(
            "features and media files cannot be mixed in one run",
            where=f"data.{request.split}",
            fix=f"make features of the other data sets, or remove {features[0]}",
            code="data.features-mixed-with-media",
        )
    if not features:
        processor.check_tokenizers()  # raise one error about the recipe instead of one about every sample
    request = replace(request, section=with_format(section, "generation"))
    rows = pack_rows(request, processor, hole=processor.hole, count_names=COUNTS)
    if features:
        empty = empty_caption(features[0], FeatureManifest.read(features[0]).key)
        rows.constants = {f"empty_{name}": tensor for name, tensor in empty.items()}
        rows.hole = partial(processor.hole, like=_without_elements(rows))
    cut = int(np.sum(rows.index.column("cut_captions")))
    if cut:
        log.warning(
            "%d of %d captions have more tokens than the model reads and are truncated; to leave such samples out: "
            "data.processor.long_captions=leave_out",
            *(cut, len(rows.index)),
        )
    return rows


def _without_elements(rows: PackedRows) -> dict[str, Tensor]:
    """Return feature tensors without rows, which have the widths and dtypes of all samples."""
    for number in range(len(rows.index)):
        try:
            stored = rows.index.read(number)[0].media()[-1].value
            assert isinstance(stored, StoredSample)
            return {name: tensor[:0].clone() for name, tensor in stored.load().items()}
        except TesseraError:  # a damaged first sample must not stop the run: try the next
            if number + 1 == len(rows.index):
                raise
    raise AssertionError("index without samples")


def build(request: RowRequest) -> RowSource:
    return captioned_rows(request, generation_processor_of(request))


KIND = build
