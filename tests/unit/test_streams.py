"""Streams of processors: a family with an audio encoder needs nothing but its own folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.config.run_config import DataSection, ModelSection
from tessera.core.outputs import LOGITS, projection
from tessera.core.sample import Encoded, MediaSize, Message, Part, Sample
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.media.files import Limits
from tessera.data.media.read import read_media
from tessera.data.media.video_frames import VideoSampling
from tessera.data.order.packed_rows import PackedRows
from tessera.models import FAMILIES, resolve
from tessera.models.processing.streams import media_size
from tessera.models.vision.processor import VISION_STREAMS
from tests.errors import raises
from tests.toys import media_zoo
from tests.toys.two_encoders import SPEC, TwoEncoderConfig
from tests.toys.two_encoders.processor import HOP, RATE, VOCAB, TwoEncoderProcessor, two_encoder_processor

CONFIG = TwoEncoderConfig(vocab=VOCAB)
IMAGE, AUDIO = VOCAB - 2, VOCAB - 1


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> TwoEncoderProcessor:
    texts = ["system user assistant What do you hear? A tone."] * 9
    return two_encoder_processor(tmp_path_factory.mktemp("tokenizer"), texts)


def conversation(*kinds: str) -> Sample:
    media = tuple(Part(kind, None) for kind in kinds)  # type: ignore[arg-type]
    said = Message("user", (*media, Part("text", "What do you hear?")))
    return Sample("-".join(kinds) or "text", (said, Message("assistant", (Part("text", "A tone."),))))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(round(seconds * RATE)).astype(np.float32)


MEDIA = {
    ("image", "audio"): [picture(40, 30), sound(1.1)],
    (): [],
    ("audio", "image", "audio"): [sound(0.3, 1), picture(16, 16, 1), sound(0.9, 2)],
    ("image",): [picture(20, 50, 2)],
}


def test_images_and_audio_pack_into_one_batch(processor: TwoEncoderProcessor) -> None:
    items = [processor.encode(conversation(*kinds), media) for kinds, media in MEDIA.items()]
    length = sum(len(item.tokens) for item in items[:2]) + 7
    batch = processor.collate([items[:2], items[2:]], length)
    assert torch.equal(batch["image_slots"], (batch["tokens"] == IMAGE).nonzero().flatten())
    assert torch.equal(batch["audio_slots"], (batch["tokens"] == AUDIO).nonzero().flatten())
    for name, tensor in (("image", "patches"), ("audio", "frames")):
        inputs = [item.streams[name] for item in items if name in item.streams]
        assert torch.equal(batch[tensor], torch.cat([part.tensors[tensor] for part in inputs]))
        assert batch.segments[name].lengths == tuple(length for part in inputs for length in part.lengths)
    assert batch.segments["audio"].lengths == (12, 4, 12)  # 1.1, 0.3 and 0.9 seconds of ten frames, in fours
    assert batch.counts["audio_frames"] == len(batch["frames"]) == 28
    assert batch.counts["patches"] == len(batch["patches"])


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64")
def test_a_packed_sample_has_the_output_that_it_has_alone(processor: TwoEncoderProcessor) -> None:
    torch.manual_seed(0)
    model = SPEC.main.build(CONFIG)
    items = [processor.encode(conversation(*kinds), media) for kinds, media in MEDIA.items()]

    def hidden(row: list[Encoded]) -> torch.Tensor:
        batch = processor.collate([row], sum(len(item.tokens) for item in row))
        inputs = {name: batch[name].double() for name in ("patches", "frames") if name in batch}
        return projection(model(batch.with_tensors(**inputs)), LOGITS).hidden

    alone = torch.cat([hidden([item]) for item in items])
    torch.testing.assert_close(hidden(items), alone, rtol=1e-9, atol=1e-9)


def test_measure_is_what_encode_gives(processor: TwoEncoderProcessor) -> None:
    names = set()
    for kinds, media in MEDIA.items():
        sample = conversation(*kinds)
        measured, encoded = (
            processor.measure(sample, [media_size(one) for one in media]),
            processor.encode(sample, media),
        )
        assert {name: measured[name] for name in encoded.counts} == encoded.counts
        audio = encoded.streams.get("audio")
        assert measured["audio_pairs"] == (0 if audio is None else sum(n**2 for n in audio.lengths))
        names.add(tuple(measured))
    assert len(names) == 1  # an index has the same columns for all samples
    travelled = pickle.loads(pickle.dumps(processor))  # noqa: S301 - our own object, as a spawned worker gets it
    assert travelled.fingerprint == processor.fingerprint


def test_from_files_to_batches_at_the_rate_of_the_family(processor: TwoEncoderProcessor, tmp_path: Path) -> None:
    """The index, packing and loader know no more of audio than of images; files have another rate than the model."""
    pytest.importorskip("av")
    (tmp_path / "a.wav").write_bytes(media_zoo.sound("sound.wav", 1.0))
    picture(30, 30).save(tmp_path / "a.png")
    said = {"from": "gpt", "value": "A tone."}
    rows = [
        {"id": "both", "image": "a.png", "audio": "a.wav", "conversations": [_asks("<image><audio>What?"), said]},
        {"id": "sound", "audio": "a.wav", "conversations": [_asks("<audio>What?"), said]},
        {"id": "words", "conversations": [_asks("What?"), said]},
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows), encoding="utf-8")
    section = DataSection.model_validate({"train": [{"path": tmp_path / "data.json"}], "length": 64, "workers": 0})
    source = KINDS.get("chat")(RowRequest(section, "train", processor, 0, tmp_path / "cache"))
    assert isinstance(source, PackedRows)
    assert {"audio_frames", "audio_pairs", "patches", "patch_pairs"} <= set(source.index.names)
    batches = [source.batch([row]) for row in range(len(source))]
    frames = -(-RATE // HOP // 4) * 4
    assert sum(batch.counts["audio_frames"] for batch in batches) == 2 * frames
    assert sorted(id for batch in batches for id in batch.sample_ids) == ["both", "sound", "words"]
    assert not any(batch.problems for batch in batches)
    sample = Sample("one", (Message("user", (Part("audio", "a.wav"),)), Message("assistant", (Part("text", "Yes."),))))
    media, sizes = read_media(sample, tmp_path, Limits(), processor)
    assert (len(media[0]), sizes) == (RATE, [MediaSize(0, 0, 0, samples=RATE)])


def _asks(question: str) -> dict[str, str]:
    return {"from": "human", "value": question}


def test_a_family_without_audio_refuses_it(processor: TwoEncoderProcessor, tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "a.wav").write_bytes(media_zoo.sound("sound.wav", 1.0))
    deaf = replace(processor, sampling=VideoSampling())
    with raises("media.kind-not-supported"):
        read_media(Sample("one", (Message("user", (Part("audio", "a.wav"),)),)), tmp_path, Limits(), deaf)
    with raises("media.kind-not-supported"):
        processor.measure(conversation("video"), [MediaSize(8, 8, 2)])


@pytest.mark.parametrize("family", ["glm4v", "internvl", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_processors_declare_the_streams_of_the_plan(family: str) -> None:
    _, config = resolve(ModelSection(family=family, preset="quickstart"))
    encoders = FAMILIES.get(family).main.plan(config).encoders
    assert encoders.keys() == VISION_STREAMS.keys()
    for name, media in VISION_STREAMS.items():
        in_plan = replace(encoders[name], width=0, per_slot=1, blank=None)
        assert in_plan == media.stream
