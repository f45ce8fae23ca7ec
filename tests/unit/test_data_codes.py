"""Codes of a data set: rows with codes in place of recordings, bad recordings, kills, workers and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tessera.config.run_config import DataSection, SourceSection
from tessera.data.media.clips import wav_bytes
from tessera.data.sources.source import open_source
from tessera.models.speech.codec import Codec
from tessera.tools.data_codes import QUARANTINE, Codes, CodeWriter, sources_of
from tests.errors import raises

RATE = 8000


class Loudness(Codec):
    """The code of a frame is its loudness in percent; that of codebook k is larger by k."""

    calls = 0
    fails_after: int | None = None

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), rate=RATE, stride=RATE // 10, codebooks=4, size=256, context=0)

    def _encode(self, sound: Tensor, codebooks: int) -> Tensor:
        self.calls += 1
        if self.fails_after is not None and self.calls > self.fails_after:
            raise KeyboardInterrupt
        frames = nn.functional.pad(sound, (0, -len(sound) % self.stride)).view(-1, self.stride)
        return (100 * frames.abs().amax(1)).round().long().unsqueeze(1) + torch.arange(codebooks)

    def _decode(self, codes: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Five recordings with texts, of which the fourth is truncated."""
    records: list[dict[str, Any]] = []
    for number in range(5):
        sound = np.full(RATE // 10 * (number + 2), 0.1 * (number + 1), np.float32)
        data = wav_bytes(sound, RATE)
        (tmp_path / f"{number}.wav").write_bytes(data[: len(data) // 2] if number == 3 else data)
        records.append({"id": f"r{number}", "audio": f"{number}.wav", "text": f"Number {number}.", "speaker": number})
    return write(tmp_path / "rows.jsonl", records)


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def encode(rows: Path, folder: Path, codec: Loudness | None = None, **changed: Any) -> Codes:
    options = {"shard": 2, "rank": 0, "ranks": 1} | {
        k: changed.pop(k) for k in ("shard", "rank", "ranks") if k in changed
    }
    roles = changed.pop("roles", None)
    section = DataSection(train=[SourceSection(path=rows)], **({"workers": 0, "max_bad_share": 0.5} | changed))
    writer = CodeWriter(codec or Loudness(), sources_of(section, "train"), codebooks=3, roles=roles, section=section)
    return writer.write(folder, **options)


def stored(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_rows_have_codes_in_place_of_recordings(rows: Path, tmp_path: Path) -> None:
    done = encode(rows, tmp_path / "codes")
    assert (done.rows, done.before, done.shards, done.missing) == (4, 0, 3, 0)
    assert [(bad.id, bad.code) for bad in done.bad] == [("r3", "media.damaged-file")]
    assert "r3" in (tmp_path / "codes" / QUARANTINE).read_text()
    first, second, *_ = stored(tmp_path / "codes")
    assert first == {"id": "r0", "text": "Number 0.", "speaker": "0", "audio_codes": [[10, 11, 12], [10, 11, 12]]}
    assert [frame[0] for frame in second["audio_codes"]] == [20, 20, 20]
    source = open_source(SourceSection(path=tmp_path / "codes"))
    assert (source.record_format, len(source)) == ("speech", 4)
    assert [part.kind for part in source.read(3).messages[0].parts] == ["text", "codes"]


def test_a_killed_run_continues_and_ranks_and_workers_write_the_same_rows(rows: Path, tmp_path: Path) -> None:
    encode(rows, tmp_path / "codes")
    with pytest.raises(KeyboardInterrupt):
        encode(rows, tmp_path / "killed", _failing(2))
    assert not (tmp_path / "killed").exists()
    done = encode(rows, tmp_path / "killed", again := Loudness())
    assert (done.rows, done.before, again.calls) == (2, 2, 2)
    torn = tmp_path / "torn"
    with pytest.raises(KeyboardInterrupt):
        encode(rows, torn, _failing(3))
    file = tmp_path / "torn.part" / "codes-00000.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    encode(rows, torn)
    assert encode(rows, tmp_path / "shared", rank=1, ranks=2).missing == 2
    assert encode(rows, tmp_path / "shared", rank=0, ranks=2).missing == 0
    encode(rows, tmp_path / "workers", workers=2)
    for other in ("killed", "torn", "shared", "workers"):
        assert stored(tmp_path / other) == stored(tmp_path / "codes")
        assert (tmp_path / other / QUARANTINE).read_text() == (tmp_path / "codes" / QUARANTINE).read_text()
    assert encode(rows, tmp_path / "codes", _failing(0)).before == 4


def test_another_process_may_publish_the_folder_first(rows: Path, tmp_path: Path) -> None:
    class Overtaken(Loudness):
        def _encode(self, sound: Tensor, codebooks: int) -> Tensor:
            if not self.calls:
                encode(rows, tmp_path / "codes")
            return super()._encode(sound, codebooks)

    assert encode(rows, tmp_path / "codes", Overtaken()).missing == 0
    encode(rows, tmp_path / "alone")
    assert stored(tmp_path / "codes") == stored(tmp_path / "alone")


def _failing(after: int) -> Loudness:
    codec = Loudness()
    codec.fails_after = after
    return codec


def test_conversations_keep_recordings_that_the_model_hears(rows: Path, tmp_path: Path) -> None:
    def turn(role: str, file: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": "Yes."}, {"type": "audio", "audio": file}], **more}

    talk = write(
        tmp_path / "talk.jsonl",
        [{"id": "t", "messages": [turn("user", "0.wav"), turn("assistant", "1.wav", speaker=7)]}],
    )
    done = encode(talk, tmp_path / "some", roles=("assistant",))
    assert done.root == tmp_path
    ((question, answer),) = (row["messages"] for row in stored(tmp_path / "some"))
    assert question["content"][1] == {"type": "audio", "audio": "0.wav"}
    assert answer["speaker"] == "7"
    assert answer["content"][1] == {"type": "codes", "codes": [[20, 21, 22]] * 3}
    encode(talk, tmp_path / "all")
    assert [m["content"][1]["type"] for m in stored(tmp_path / "all")[0]["messages"]] == ["codes", "codes"]
    text = write(
        tmp_path / "text.jsonl",
        [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]}],
    )
    with raises("data.no-row-written"):
        encode(text, tmp_path / "none")


def test_unusable_requests_are_refused(rows: Path, tmp_path: Path) -> None:
    with raises("data.bad-sample"):
        encode(rows, tmp_path / "a", on_bad_sample="fail", max_bad_share=0.05)
    for number in range(3):
        (tmp_path / f"{number}.wav").unlink()
    with raises("data.too-many-bad-samples"):
        encode(rows, tmp_path / "b")
    with raises("data.features-made-otherwise"):
        encode(rows, tmp_path / "b", shard=3)
    with raises("output.exists"):
        encode(rows, tmp_path)
    with raises("data.features-of-weighted-sets"):
        sources_of(DataSection(train=[SourceSection(path=rows, weight=1.0)]), "train")
    with raises("data.no-samples"):
        sources_of(DataSection(), "train")
