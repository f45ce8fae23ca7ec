"""Processors of all vision-language families against transformers: pixels, tokens and positions are identical.

What is particular to one family (windows, timestamps, tiles, tables of positions) is tested in its own file.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import clip, patches, picture, talk, text
from PIL import Image
from processor_families import PROCESSORS
from processors import ProcessorCase, sizes_of

from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.media.files import Limits
from tessera.data.media.read import read_media
from tests.errors import raises
from tests.needs import need_transparency_over_white

NAMES = list(PROCESSORS)
WITH_CLIPS = [name for name, case in PROCESSORS.items() if case.clips]
MEDIA = [(), ("image",), ("image", "image"), ("video",), ("image", "video", "image")]
SHOWN = [(name, media) for name in NAMES for media in MEDIA if PROCESSORS[name].clips or "video" not in media]


def things(*kinds: str, frames: int = 5) -> list[Any]:
    return [clip(frames) if kind == "video" else picture(61 + 30 * n, 87, seed=n) for n, kind in enumerate(kinds)]


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in NAMES for size in PROCESSORS[name].sizes])
def test_pixels_are_the_references(name: str, size: tuple[int, int]) -> None:
    case, image = PROCESSORS[name], picture(*size)
    ours = case.processor.encode(case.conversation("image"), [image])
    assert torch.equal(case.pixels(ours), case.reference_pixels([image]))
    assert patches(ours)["pixels"].dtype == torch.uint8


@pytest.mark.parametrize("name", NAMES)
def test_pixels_of_several_pictures_are_the_references(name: str) -> None:
    case, images = PROCESSORS[name], [picture(61, 87), picture(50, 33, 1), picture(28, 84, 2)]
    ours = case.processor.encode(case.conversation("image", "image", "image"), images)
    assert torch.equal(case.pixels(ours), case.reference_pixels(images))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "CMYK", "1"])
@pytest.mark.parametrize("name", ["internvl", "llava", "qwen2_vl"])
def test_pixels_of_other_modes(name: str, mode: str) -> None:
    if "A" in mode:
        need_transparency_over_white()
        if name == "internvl":
            pytest.skip("the reference drops transparency")
    case, image = PROCESSORS[name], picture(64, 48, mode=mode)
    ours = case.processor.encode(case.conversation("image"), [image])
    assert torch.equal(case.pixels(ours), case.reference_pixels([image]))


@pytest.mark.parametrize("name", WITH_CLIPS)
def test_a_clip_is_the_references_frames(name: str) -> None:
    """Five frames: where a patch has two of them, the last one fills both places in time."""
    case, frames, sample = PROCESSORS[name], clip(5), PROCESSORS[name].conversation("video")
    ours = case.processor.encode(sample, [frames])
    assert torch.equal(case.pixels(ours), case.reference_clip(frames, ours))
    size = MediaSize(70, 90, 5)
    target = case.processor.target("video", size)
    assert target is not None
    small = np.stack([np.asarray(Image.fromarray(f).resize(target, Image.Resampling.BICUBIC)) for f in frames])
    again = case.processor.encode(sample, [small], [size])  # frames that were decoded in the size they are used in
    assert torch.equal(patches(again)["pixels"], patches(ours)["pixels"])
    assert torch.equal(again.tokens, ours.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_read_as_training_reads_them_have_the_same_pixels(name: str, tmp_path: Path) -> None:
    """Made smaller while they are decoded, where that changes nothing."""
    processor = PROCESSORS[name].processor
    picture(900, 700).save(tmp_path / "a.png")
    sample = Sample("one", (Message("user", (Part("image", "a.png"),)), Message("assistant", (text("Yes."),))))
    media, sizes = read_media(sample, tmp_path, Limits(), processor)
    assert sizes == [MediaSize(900, 700)]
    encoded = processor.encode(sample, media, sizes)
    assert torch.equal(patches(encoded)["pixels"], patches(processor.encode(sample, [picture(900, 700)]))["pixels"])
    assert processor.measure(sample, sizes)["tokens"] == len(encoded.tokens)
    assert torch.equal(processor.prompt([sample], [media], [sizes])["pixels"], patches(encoded)["pixels"])


@pytest.mark.parametrize(("name", "kinds"), SHOWN)
def test_tokens_and_positions_are_the_references(name: str, kinds: tuple[str, ...]) -> None:
    case, media = PROCESSORS[name], things(*kinds)
    sample = case.conversation(*kinds)
    ours = case.processor.encode(sample, media)
    assert ours.tokens.tolist() == case.tokens(sample, media, sizes_of(media), answer=False)
    assert torch.equal(ours.positions, case.reference_positions(ours, sample, media))
    question = Sample("one", sample.messages[:-1])
    prompt = case.processor.prompt([sample], [media])
    assert prompt["tokens"].tolist() == case.tokens(question, media, sizes_of(media), answer=True)


@pytest.mark.parametrize("name", NAMES)
def test_text_alone_with_and_without_a_system_message(name: str) -> None:
    case = PROCESSORS[name]
    for opening in (("system", "Be brief."), ("user", "Hi")):
        sample = talk(opening, ("assistant", "Yes."))
        ours = case.processor.encode(sample, [])
        assert ours.tokens.tolist() == case.tokens(sample, [], [], answer=False)
        assert torch.equal(ours.positions, torch.arange(len(ours.tokens)).expand_as(ours.positions))
        batch = case.processor.collate([[ours]], 128)
        assert "pixels" not in batch
        assert "pixel_scale" not in batch


@pytest.mark.parametrize("system", [None, "Be brief.", "Answer in {{ braces }}."])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_folder_brings_its_own_system_prompt_and_sampling(
    name: str, system: str | None, tmp_path: Path
) -> None:
    """An export answers as the run did: nobody has to repeat the options that it was trained with."""
    case = PROCESSORS[name]
    saved = case.load(case.folder, system=system, fps=3.0, max_frames=10)
    saved.save(tmp_path)
    again = case.load(tmp_path)
    assert again.template == saved.template
    assert again.sampling == saved.sampling or not case.clips  # LLaVA 1.5 keeps no rate
    sample = talk(("user", "Hi"), ("assistant", "Yes."))
    assert torch.equal(again.encode(sample, []).tokens, saved.encode(sample, []).tokens)
    assert case.load(tmp_path, system="Other.").template.system == "Other."


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_travels_and_comes_back_from_its_files(name: str) -> None:
    case = PROCESSORS[name]
    again = case.load(case.exported)
    assert again.fingerprint == case.processor.fingerprint
    assert again.training_on(["user"]).fingerprint != case.processor.fingerprint
    travelled = pickle.loads(pickle.dumps(case.processor))  # noqa: S301 - our own object, as a spawned worker gets it
    assert travelled.fingerprint == case.processor.fingerprint
    assert travelled.stop_tokens == case.processor.stop_tokens == tuple(case.ids(*case.ends))


@pytest.mark.parametrize("name", NAMES)
def test_only_what_the_assistant_says_is_trained(name: str) -> None:
    case = PROCESSORS[name]
    kinds = ("image", "video") if case.clips else ("image",)
    sample, media = case.conversation(*kinds), things(*kinds)
    ours = case.processor.encode(sample, media)
    trained = ours.labels != IGNORE
    assert torch.equal(ours.labels[trained], ours.tokens[trained])
    spoken = case.processor.spell(ours.tokens[trained].tolist())
    end = case.ends[0]
    # The header's newline and the answer's own first newline may be one token; then it is trained.
    assert [turn.strip() for turn in spoken.split(end)] == ["A red square.", "中文 12345", ""]
    last = case.processor.training_on(["assistant"], last_only=True).encode(sample, media)
    assert case.processor.spell(last.tokens[last.labels != IGNORE].tolist()).strip() == f"中文 12345{end}"
    both = case.processor.training_on(["assistant", "user"]).encode(sample, media)
    assert "What is in the picture?" in case.processor.decode(both.tokens[both.labels != IGNORE].tolist())
    assert not bool(case.is_media(both.labels).any())


@pytest.mark.parametrize("name", NAMES)
def test_measure_is_what_encode_gives(name: str) -> None:
    case = PROCESSORS[name]
    kinds = ("image", "video") if case.clips else ("image", "image")
    media = [picture(333, 191), clip(7, 80, 150) if case.clips else picture(40, 20)]
    sample = case.conversation(*kinds)
    measured, encoded = case.processor.measure(sample, sizes_of(media)), case.processor.encode(sample, media)
    assert {count: measured[count] for count in encoded.counts} == encoded.counts
    stream = encoded.streams["vision"]
    assert measured["tokens"] == len(encoded.tokens)
    assert measured["trained"] == int((encoded.labels[1:] != IGNORE).sum())
    assert measured["patches"] == sum(stream.lengths)
    assert {len(tensor) for tensor in stream.tensors.values()} == {measured["patches"]}
    assert measured["patch_pairs"] == sum(length**2 for length in stream.lengths)
    assert measured["window_pairs"] == sum(length**2 for length in stream.windows)
    assert (measured["images"], measured["frames"]) == ((1, 7) if case.clips else (2, 0))


def packed(case: ProcessorCase) -> tuple[list[Any], Any, int]:
    kinds = ("image", "video") if case.clips else ("image", "image")
    media = [picture(56, 56), np.zeros((4, 56, 56, 3), dtype=np.uint8) if case.clips else picture(56, 57)]
    samples = [(("image",), [picture(56, 84)]), ((), []), (kinds, media)]
    items = [case.processor.encode(case.conversation(*kinds), media) for kinds, media in samples]
    length = max(len(items[0].tokens) + len(items[1].tokens), len(items[2].tokens)) + 5
    return items, case.processor.collate([items[:2], items[2:]], length), length


@pytest.mark.parametrize("name", NAMES)
def test_collate_packs_rows(name: str) -> None:
    case = PROCESSORS[name]
    (a, b, c), batch, length = packed(case)
    assert batch["tokens"].shape == batch["labels"].shape == (2 * length,)
    assert batch["positions"].shape == (*a.positions.shape[:-1], 2 * length)
    for item, start in ((a, 0), (b, len(a.tokens)), (c, length)):
        end = start + len(item.tokens)
        assert {start, end} <= set(batch.segments["text"].bounds.tolist())
        assert torch.equal(batch["tokens"][start:end], item.tokens)
        assert torch.equal(batch["positions"][..., start:end], item.positions)
        assert torch.equal(batch["labels"][start : end - 1], item.labels[1:])
        assert int(batch["labels"][end - 1]) == IGNORE  # does not predict the next sample
    media = case.is_media(batch["tokens"]).nonzero()[:, 0]
    assert torch.equal(batch["media_slots"].sort().values, media)
    inputs = [a.streams["vision"], c.streams["vision"]]
    for key, tensor in inputs[0].tensors.items():
        assert torch.equal(batch[key], torch.cat([tensor, inputs[1].tensors[key]]))
    assert batch.segments["vision"].lengths == inputs[0].lengths + inputs[1].lengths
    assert batch.counts["trained"] == int((batch["labels"] != IGNORE).sum())
    assert batch.counts["samples"] == 3


@pytest.mark.parametrize("name", NAMES)
def test_special_words_in_a_text_stay_text(name: str) -> None:
    case = PROCESSORS[name]
    forged = case.processor.encode(talk(("user", f"a {case.forged} b"), ("assistant", "ok")), []).tokens
    plain = case.processor.encode(talk(("user", "a b"), ("assistant", "ok")), []).tokens
    for word in (token for token in case.processor.template.special_words() if token in case.forged):
        (number,) = case.ids(word)
        assert int((forged == number).sum()) == int((plain == number).sum())


@pytest.mark.parametrize("name", NAMES)
def test_mistakes_are_explained(name: str, tmp_path: Path) -> None:
    case = PROCESSORS[name]
    with raises("recipe.unknown-key"):
        case.load(case.folder, fpss=5)
    with raises("tokenizer.no-file"):
        case.load(tmp_path)
    with raises("tokenizer.token-id-mismatch"):
        case.kind.load(case.configure(**{case.mistaken_token: 5}), case.folder)
    with raises("recipe.wrong-value"):
        case.load(case.folder, frames=8, fps=1.0)
    with raises("recipe.wrong-value", "max_frames"):
        case.load(case.folder, min_frames=9, max_frames=8)
    with raises("media.kind-not-supported"):
        case.processor.measure(case.conversation(case.unsupported), [MediaSize(0, 0, 0, 16000)])
