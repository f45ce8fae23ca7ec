"""Recordings in data sets: encodings, parts of recordings by seconds, every spelling of a row, and unusable files."""

from __future__ import annotations

import base64
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import write_jsonl

from tessera.config.run_config import DataSection, SourceSection
from tessera.core.sample import PLAIN, Part, Sample
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.media.audio import AudioSampling
from tessera.data.media.clips import AudioClip, AudioSamples
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode, probe
from tessera.data.order.packed_rows import PackedRows
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import Source, open_source
from tessera.tools.data_convert import convert
from tests.errors import raises
from tests.toys import speech
from tests.toys.media_zoo import tone
from tests.toys.two_encoders.processor import two_encoder_processor

RATE = 16_000
SAMPLING = MediaSampling(audio=AudioSampling(RATE, max_seconds=60))
ENCODINGS = {
    "a.wav": ("wav", "pcm_s16le"),
    "a.flac": ("flac", "flac"),
    "a.mp3": ("mp3", "libmp3lame"),
    "a.ogg": ("ogg", "libopus"),
    "a.m4a": ("mp4", "aac"),
    "a.mkv": ("matroska", "aac"),
    "a.mov": ("mov", "pcm_s16le"),
}


def heard(value: Any, root: Path, sampling: MediaSampling = SAMPLING) -> np.ndarray:
    """Decode a recording, and check that its header states the same length."""
    part = Part("audio", value)
    sound = decode(part, root, Limits(), sampling)
    assert sound.dtype == np.float32
    assert probe(part, root, Limits(), sampling).samples == len(sound)
    return np.asarray(sound)


# ---------------------------------------------------------------------------------------------- parts of recordings


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_clip_is_the_same_part_of_the_full_recording(tmp_path: Path, name: str) -> None:
    rate = 48_000 if name == "a.ogg" else RATE
    (tmp_path / name).write_bytes(speech.encoded(speech.steps(8, rate), rate, *ENCODINGS[name]))
    full = heard(name, tmp_path)
    for start, end in ((0.0, 1.0), (0.25, 0.9), (5.1, 5.9), (2.0, 7.5)):
        clip = heard(AudioClip(name, start, end), tmp_path)
        assert len(clip) == round((end - start) * RATE)
        # Matroska rounds time stamps to milliseconds; every other format is exact at this rate.
        shift = RATE // 1000 if name == "a.mkv" else 0
        at = round(start * RATE)
        errors = [
            np.abs(clip[shift : len(clip) - shift] - full[at + shift + lag : at + lag + len(clip) - shift]).max()
            for lag in range(-min(shift, at), shift + 1)
        ]
        assert min(errors) == 0.0
    assert speech.pitch(heard(AudioClip(name, 5.1, 5.9), tmp_path), RATE) == pytest.approx(800, abs=3)


def test_clip_of_a_recording_that_is_too_long_as_a_whole(tmp_path: Path) -> None:
    """Ten hours of 16 bit audio, in a file without blocks on the disk: only the clip is read."""
    size, head = 36_000 * RATE * 2, speech.wav(np.zeros(0, np.float32), RATE)
    with (tmp_path / "long.wav").open("wb") as file:
        file.write(head[:-4] + struct.pack("<I", size))
        file.seek(len(head) + 35_000 * RATE * 2)
        file.write((tone(1, RATE, 500) * 32767).astype("<i2").tobytes())
        file.truncate(len(head) + size)
    for action in (probe, decode):
        with raises("media.audio-too-long", "36000"):
            action(Part("audio", "long.wav"), tmp_path, Limits(), SAMPLING)
    assert speech.pitch(heard(AudioClip("long.wav", 35_000, 35_001), tmp_path), RATE) == 500
    with raises("media.clip-outside"):
        probe(Part("audio", AudioClip("long.wav", 35_999, 36_020)), tmp_path, Limits(), SAMPLING)
    with raises("media.audio-too-long"):
        probe(Part("audio", AudioClip("long.wav", 0, 61)), tmp_path, Limits(), SAMPLING)


def test_clip_beyond_the_end_of_a_file_without_a_length_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_bytes(speech.encoded(speech.steps(3, RATE), RATE, "mp3", "libmp3lame"))
    for start, end in ((2.5, 9.0), (60.0, 90.0)):
        with raises("media.clip-outside", "lasts 3.0"):
            decode(Part("audio", AudioClip("a.mp3", start, end)), tmp_path, Limits(), SAMPLING)
    for start, end in ((2.0, 1.0), (1.0, 1.0), (-1.0, 2.0), (0.0, float("nan")), (0.0, float("inf"))):
        with raises("media.bad-clip"):
            AudioClip("a.mp3", start, end)


# ---------------------------------------------------------------------------------------------- encodings


def test_depths_rates_and_channels(tmp_path: Path) -> None:
    sound = tone(1, 48_000, 440)
    exact = heard(speech.wav(sound, 48_000, -32), tmp_path)
    for bits in (8, 16, 24, 32, -32):
        decoded = heard(speech.wav(sound, 48_000, bits), tmp_path)
        assert len(decoded) == RATE
        # Rounding to the depth, in each of the few samples that one sample of the result is made of.
        assert np.abs(decoded - exact).max() <= 4 * 2.0 ** (1 - min(abs(bits), 24))
    for rate in (8_000, 22_050, 96_000, 192_000):
        assert speech.pitch(heard(speech.wav(tone(1, rate), rate), tmp_path), RATE) == pytest.approx(440, abs=1)
    eight = np.stack([sound, *[np.zeros_like(sound)] * 7], axis=1)
    assert np.abs(heard(speech.wav(eight, 48_000, -32), tmp_path) - exact / 8).max() < 1e-4


def test_sound_track_of_a_video(tmp_path: Path) -> None:
    import av

    rate = 48_000
    with av.open(str(tmp_path / "film.mp4"), "w") as container:
        video: Any = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        audio: Any = container.add_stream("aac", rate=rate, layout="mono")
        for _ in range(20):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            container.mux(video.encode(frame))
        size = audio.codec_context.frame_size
        for at in range(0, 2 * rate - size, size):
            block = speech.steps(2, rate)[at : at + size]
            piece = av.AudioFrame.from_ndarray(block[None], format="fltp", layout="mono")
            piece.sample_rate, piece.pts = rate, at
            container.mux(audio.encode(piece))
        container.mux(video.encode())
        container.mux(audio.encode())
    assert speech.pitch(heard(AudioClip("film.mp4", 1.1, 1.8), tmp_path), RATE) == pytest.approx(400, abs=3)
    row = {"messages": [{"role": "user", "content": "<audio>film.mp4#t=1,1.5</audio>What?"}]}
    assert sample_of(tmp_path, row).media() == [Part("audio", AudioClip("film.mp4", 1.0, 1.5))]


def test_decoded_audio_is_resampled(tmp_path: Path) -> None:
    sound = tone(1, 44_100, 440)
    from_file = heard(speech.wav(sound, 44_100, -32), tmp_path)
    for array in (sound, np.stack([sound, sound]), np.stack([sound, sound], axis=1)):
        assert np.array_equal(heard(AudioSamples(array, 44_100), tmp_path), from_file)
    assert np.abs(heard(AudioSamples((sound * 32768).astype(np.int16), 44_100), tmp_path) - from_file).max() < 1e-3
    assert np.array_equal(heard(AudioSamples(sound, RATE), tmp_path), sound[: len(sound)])
    for array, rate in (
        (np.full(9, np.nan, np.float32), RATE),
        (np.zeros(0, np.float32), RATE),
        (np.zeros((2, 2, 2), np.float32), RATE),
        (np.zeros(9, np.uint8), RATE),
        (sound, 16e3),
    ):
        with raises("media.wrong-array"):
            probe(Part("audio", AudioSamples(array, rate)), tmp_path, Limits(), SAMPLING)  # type: ignore[arg-type]
    with raises("media.unreadable-file"):
        probe(Part("audio", AudioSamples(sound, 10)), tmp_path, Limits(), SAMPLING)


# ---------------------------------------------------------------------------------------------- unusable files


def test_silence_is_audio_and_a_wrong_suffix_does_not_matter(tmp_path: Path) -> None:
    assert not heard(speech.wav(np.zeros(RATE, np.float32), RATE), tmp_path).any()
    (tmp_path / "mp3.wav").write_bytes(speech.encoded(speech.steps(1, RATE), RATE, "mp3", "libmp3lame"))
    assert len(heard("mp3.wav", tmp_path)) > RATE


def test_files_without_audio(tmp_path: Path) -> None:
    whole = speech.wav(tone(1, RATE), RATE)
    bad = {
        "media.unreadable-file": [b"", b"Not a sound.", speech.wav(np.zeros(0, np.float32), RATE), whole[:30]],
        "media.damaged-file": [whole[: len(whole) // 2], whole[:40]],
    }
    for code, files in bad.items():
        for data in files:
            with raises(code):
                probe(Part("audio", data), tmp_path, Limits(), SAMPLING)
    flac = speech.encoded(speech.steps(2, RATE), RATE, "flac", "flac")
    with raises("media.damaged-file"):
        decode(Part("audio", flac[: len(flac) // 2]), tmp_path, Limits(), SAMPLING)


def test_samples_that_are_not_numbers(tmp_path: Path) -> None:
    """They would make every feature of a recording NaN, and then the loss."""
    for value in (np.nan, -np.inf, 1e30):
        sound = tone(0.1, RATE)
        sound[9] = value
        with raises("media.damaged-file"):
            decode(Part("audio", speech.wav(sound, RATE, -32)), tmp_path, Limits(), SAMPLING)
        with raises("media.wrong-array"):
            decode(Part("audio", sound), tmp_path, Limits(), SAMPLING)


# ---------------------------------------------------------------------------------------------- spellings of rows


def opened(path: Path, rows: list[dict[str, Any]], **section: Any) -> Source:
    return open_source(SourceSection(path=write_jsonl(path / "rows.jsonl", rows), **section))


def sample_of(path: Path, row: dict[str, Any], **section: Any) -> Sample:
    return opened(path, [row], **section).read(0)


def spoken(sample: Sample) -> list[tuple[str, list[Any]]]:
    return [(message.role, [part.value for part in message.parts]) for message in sample.messages]


def test_conversations_with_audio(tmp_path: Path) -> None:
    data = speech.wav(tone(0.1, RATE), RATE)
    encoded = base64.b64encode(data).decode()
    answer = {"role": "assistant", "content": "A tone."}
    parts: list[tuple[dict[str, Any], Any]] = [
        ({"type": "audio", "audio": "a.wav"}, "a.wav"),
        ({"type": "audio", "path": "a.wav"}, "a.wav"),
        ({"type": "audio", "audio": "a.wav#t=1,2.5"}, AudioClip("a.wav", 1.0, 2.5)),
        ({"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded}"}}, data),
        ({"type": "audio_url", "audio_url": "a.wav"}, "a.wav"),
        ({"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}, data),
    ]
    for part, value in parts:
        row = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}, answer]}
        assert spoken(sample_of(tmp_path, row)) == [("user", [value, "What?"]), ("assistant", ["A tone."])]
    for content in ({"data": encoded}, {"data": "%%%", "format": "wav"}, {"data": encoded, "format": "x;y"}, "a.wav"):
        row = {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": content}]}, answer]}
        with pytest.raises(RecordError):
            sample_of(tmp_path, row)

    expected = [("user", ["a.wav", "What?"]), ("assistant", ["A tone."])]
    turns = [{"from": "human", "value": "<audio>What?"}, {"from": "gpt", "value": "A tone."}]
    swift = [{"role": "user", "content": "<audio>What?"}, answer]
    for row in (
        {"conversations": turns, "audios": ["a.wav"]},
        {"messages": swift, "audios": ["a.wav"]},
        {"messages": swift, "audios": [{"bytes": None, "path": "a.wav"}]},
        {"query": "<audio>What?", "response": "A tone.", "audios": ["a.wav"]},
        {"query": "<audio>a.wav</audio>What?", "response": "A tone."},
        {"question": "What?", "answer": "A tone.", "audio": "a.wav"},
    ):
        assert spoken(sample_of(tmp_path, row)) == expected
    listed = {"conversations": turns, "audios": ["a.wav#t=0.5,2"]}
    assert spoken(sample_of(tmp_path, listed))[0] == ("user", [AudioClip("a.wav", 0.5, 2.0), "What?"])
    with raises("media.bad-clip"):
        sample_of(tmp_path, {"conversations": turns, "audios": ["a.wav#t=3,2"]})


def test_transcripts(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], list[Any]]] = [
        ({"audio_filepath": "a.wav", "duration": 3.2, "text": "one two"}, ["a.wav"]),
        ({"audio_filepath": "a.wav", "offset": 1.5, "duration": 2, "text": "one two"}, [AudioClip("a.wav", 1.5, 3.5)]),
        ({"audio": "a.wav", "sentence": "one two"}, ["a.wav"]),
        ({"audio": {"bytes": None, "path": "a.wav"}, "text": "one two"}, ["a.wav"]),
        ({"audio": "a.wav", "transcription": " one two\n", "instruction": "Write."}, ["a.wav", "Write."]),
        ({"audios": ["a.wav"], "text": "one two"}, ["a.wav"]),
    ]
    for row, question in rows:
        source = opened(tmp_path, [row])
        assert source.record_format == "transcript"
        assert spoken(source.read(0)) == [("user", question), ("assistant", ["one two"])]
    sample = sample_of(tmp_path, rows[0][0], instruction="Transcribe.")
    assert spoken(sample)[0] == ("user", ["a.wav", "Transcribe."])
    renamed = {"sound": "a.wav", "said": "one two", "from": 1, "long": 2}
    columns = {"audios": "sound", "text": "said", "offset": "from", "duration": "long"}
    assert spoken(sample_of(tmp_path, renamed, columns=columns))[0] == ("user", [AudioClip("a.wav", 1.0, 3.0)])
    # A placeholder, or `format: text`, makes it a document.
    assert sample_of(tmp_path, {"text": "First <audio>.", "audios": ["a.wav"]}).messages[0].role == PLAIN
    assert sample_of(tmp_path, rows[5][0], format="text").messages[0].role == PLAIN
    with raises("data.instruction-without-effect"):
        opened(tmp_path, [{"text": "A document."}], instruction="Transcribe.")


def test_transcripts_that_cannot_be_used(tmp_path: Path) -> None:
    good = {"audio_filepath": "a.wav", "text": "one"}
    bad = [
        ({"text": "words without a recording"}, "data.no-audio"),
        ({"audio_filepath": "", "text": "one"}, "data.no-audio"),
        ({"audio_filepath": "a.wav", "text": " "}, "data.no-text"),
        ({"audio_filepath": "a.wav"}, "data.no-text"),
        ({"audio_filepath": "a.wav", "text": "one", "offset": 1}, "media.bad-clip"),
        ({"audio_filepath": "a.wav", "text": "one", "offset": 1, "duration": -1}, "media.bad-clip"),
        ({"audio_filepath": "a.wav#t=0,9", "text": "one", "offset": 1, "duration": 1}, "media.bad-clip"),
    ]
    source = opened(tmp_path, [good, *(row for row, _ in bad)])
    codes = [error.code for _, error in source.scan(range(len(source))) if isinstance(error, RecordError)]
    assert codes == [code for _, code in bad]


def test_audio_columns_of_hugging_face(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = speech.wav(speech.steps(3, RATE), RATE)
    rows = {
        "audio": [{"bytes": data, "path": "1.wav"}, {"bytes": data, "path": "2.wav"}],
        "text": ["one", "two"],
        "offset": [None, 1.0],
        "duration": [3.0, 1.0],
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    source = open_source(SourceSection(path=tmp_path / "a.parquet"))
    assert [spoken(source.read(number))[0][1] for number in (0, 1)] == [[data], [AudioClip(data, 1.0, 2.0)]]
    assert speech.pitch(heard(source.read(1).media()[0].value, tmp_path), RATE) == 400
    assert source.read(0) != source.read(1)
    decoded = {"path": "cache/1.wav", "array": [0.0, 0.5], "sampling_rate": RATE}
    parquet.write_table(pyarrow.table({"audio": [decoded], "text": ["one"]}), tmp_path / "b.parquet")
    (part,) = open_source(SourceSection(path=tmp_path / "b.parquet")).read(0).media()
    assert heard(part.value, tmp_path).tolist() == [0.0, 0.5]


def test_recordings_in_folders_and_archives(tmp_path: Path) -> None:
    data = speech.wav(speech.steps(3, RATE), RATE)
    expected = [("user", ["a.wav"]), ("assistant", ["one two"])]

    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "a.wav").write_bytes(data)
    (beside / "a.txt").write_text("one two")
    assert spoken(open_source(SourceSection(path=beside)).read(0)) == expected
    (beside / "metadata.csv").write_text("file_name,transcription\na.wav,one two\n")
    assert spoken(open_source(SourceSection(path=beside)).read(0)) == expected

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        (tmp_path / "a.json").write_text(
            json.dumps({"audio_filepath": "a.wav", "offset": 1, "duration": 1, "text": "b"})
        )
        archive.add(beside / "a.wav", "a.wav")
        archive.add(tmp_path / "a.json", "a.json")
    (part,) = open_source(SourceSection(path=tmp_path / "a.tar")).read(0).media()
    assert isinstance(part.value, AudioClip)
    assert speech.pitch(heard(part.value, tmp_path), RATE) == 400


def test_librispeech(tmp_path: Path) -> None:
    flac = speech.encoded(speech.steps(1, RATE), RATE, "flac", "flac")
    for chapter, texts in {"84/121123": ["GO", "DO YOU HEAR"], "9/2": ["WHO"]}.items():
        folder = tmp_path / "dev-clean" / chapter
        folder.mkdir(parents=True)
        stem = chapter.replace("/", "-")
        lines = [f"{stem}-{number:04} {text}\n" for number, text in enumerate(texts)]
        (folder / f"{stem}.trans.txt").write_text("".join(lines))
        for number in range(len(texts)):
            (folder / f"{stem}-{number:04}.flac").write_bytes(flac)
    (tmp_path / "README.TXT").write_text("About")
    for _ in range(2):  # the second time from the cache
        source = open_source(SourceSection(path=tmp_path), tmp_path / "cache")
        samples = [source.read(number) for number in range(len(source))]
        assert [sample.id for sample in samples] == ["84-121123-0000", "84-121123-0001", "9-2-0000"]
        name = "dev-clean/84/121123/84-121123-0001.flac"
        assert spoken(samples[1]) == [("user", [name]), ("assistant", ["DO YOU HEAR"])]
        assert len(heard(name, tmp_path)) == RATE
    assert len(open_source(SourceSection(path=tmp_path, max_samples=2))) == 2


def test_folders_of_kaldi(tmp_path: Path) -> None:
    (tmp_path / "wav.scp").write_text("talk audio/talk.flac\nother audio/other.wav\n")
    (tmp_path / "text").write_text("talk-1 good evening\ntalk-2 hello\nlost words\nempty\n")
    (tmp_path / "segments").write_text("talk-1 talk 0.5 2.25\ntalk-2 other 3 4\nempty talk 1 2\n")
    source = open_source(SourceSection(path=tmp_path))
    assert source.read(0).id == "talk-1"
    assert spoken(source.read(0))[0] == ("user", [AudioClip("audio/talk.flac", 0.5, 2.25)])
    assert spoken(source.read(1))[0] == ("user", [AudioClip("audio/other.wav", 3.0, 4.0)])
    for number, code in ((2, "data.no-audio"), (3, "data.no-text")):
        with raises(code):
            source.read(number)
    (tmp_path / "segments").unlink()
    (tmp_path / "text").write_text("talk good evening\n")
    assert spoken(open_source(SourceSection(path=tmp_path)).read(0))[0] == ("user", ["audio/talk.flac"])
    (tmp_path / "wav.scp").write_text("talk touch /tmp/x; sox talk.sph -t wav - |\n")
    with raises("data.recording-is-command"):
        open_source(SourceSection(path=tmp_path))


def test_conversion_keeps_parts_of_recordings(tmp_path: Path) -> None:
    manifest = {"audio_filepath": "a.wav", "offset": 0.1, "duration": 0.2, "text": "one"}
    source = SourceSection(path=write_jsonl(tmp_path / "rows.jsonl", [manifest]))
    convert(source, tmp_path / "plain.jsonl")
    again = open_source(SourceSection(path=tmp_path / "plain.jsonl")).read(0)
    assert again.messages == open_source(source).read(0).messages


def test_bad_recordings_are_quarantined(tmp_path: Path) -> None:
    """Headers decide for the index; what only decoding finds is left out of its row."""
    good = speech.wav(tone(0.4, RATE), RATE)
    flac = speech.encoded(speech.steps(2, RATE), RATE, "flac", "flac")
    files = {
        "good.wav": good,
        "empty.wav": b"",
        "zero.wav": speech.wav(np.zeros(0, np.float32), RATE),
        "cut.wav": good[:-100],
        "cut.flac": flac[: len(flac) // 2],
        "text.wav": b"Not a sound.",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    rows = [{"id": name, "audio_filepath": name, "text": "A tone."} for name in files]
    rows += [
        {"id": "missing", "audio_filepath": "none.wav", "text": "A tone."},
        {"id": "outside", "audio_filepath": "good.wav#t=0.1,9", "text": "A tone."},
        {"id": "mute", "text": "Words alone."},
    ]
    section = DataSection.model_validate(
        {
            "train": [{"path": write_jsonl(tmp_path / "rows.jsonl", rows)}],
            **{"length": 64, "workers": 0, "max_bad_share": 1.0, "shuffle": False},
        }
    )
    processor = two_encoder_processor(tmp_path / "tokenizer", ["user assistant A tone."] * 9)
    source = KINDS.get("chat")(RowRequest(section, "train", processor, 0, tmp_path / "cache"))
    assert isinstance(source, PackedRows)
    assert {bad.id: bad.code for bad in source.index.bad} == {
        "empty.wav": "media.unreadable-file",
        "zero.wav": "media.unreadable-file",
        "cut.wav": "media.damaged-file",
        "text.wav": "media.unreadable-file",
        "missing": "media.no-such-file",
        "outside": "media.clip-outside",
        "mute": "data.no-audio",
    }
    batches = [source.batch([row]) for row in range(len(source))]
    assert [bad.code for batch in batches for bad in batch.problems] == ["media.damaged-file"]
    assert sum(batch.counts["audio_frames"] for batch in batches) == 4
