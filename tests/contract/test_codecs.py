"""Codecs equal the classes of transformers, in one call and in chunks, from folders of their own and of models."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.errors import TesseraError
from tessera.models.speech.codec import MimiCodec, SoundStream, WaveDecoder, has_codec, load_codec
from tests.contract.codecs import WAVE, mimi, mimi_folder, wave_decoder
from tests.errors import raises

pytest.importorskip("transformers")


def sound(seconds: float) -> torch.Tensor:
    return 0.3 * torch.randn(round(24_000 * seconds), generator=torch.Generator().manual_seed(1))


def test_codes_and_sound_equal_those_of_transformers(tmp_path: Path) -> None:
    codec, stock = load_codec(mimi_folder(tmp_path)), mimi()
    values = sound(2.01)
    with torch.no_grad():
        expected = stock.encode(values[None, None]).audio_codes
        heard = stock.decode(expected).audio_values
    codes = codec.encode(values)
    assert codes.shape == (26, 8)  # the last frame is incomplete
    assert len(codes.unique()) > 20
    assert torch.equal(codes, expected[0].T)
    assert torch.equal(codec.decode(codes), heard[0, 0])
    assert torch.equal(codec.encode(values, 3), codes[:, :3])
    assert codec.decode(codes[:, :3]).shape == heard[0, 0].shape
    assert codec.encode(values[:0]).shape == (0, 8)


def test_a_long_recording_in_chunks_equals_one_call() -> None:
    codec = MimiCodec(mimi().double())
    values = sound(5.03).double()
    codes, heard = codec.encode(values), codec.decode(codec.encode(values))
    codec.longest = codec.context + 5
    assert torch.equal(codec.encode(values), codes)
    torch.testing.assert_close(codec.decode(codes), heard)


def test_codes_of_the_omni_talker_become_the_wave_of_transformers(tmp_path: Path) -> None:
    stock = wave_decoder()
    config = {"model_type": "qwen3_omni_moe", "code2wav_config": WAVE, "thinker_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"code2wav.{name}": tensor.contiguous() for name, tensor in stock.state_dict().items()}
    save_file({**tensors, "thinker.lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    codec = load_codec(tmp_path)
    assert isinstance(codec, WaveDecoder)
    codes = torch.randint(0, 32, (40, 4), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = stock(codes.T[None])[0, 0]
        chunked = stock.chunked_decode(codes.T[None], chunk_size=300)[0, 0]
    assert torch.equal(codec.decode(codes), expected)
    assert torch.equal(expected, chunked)
    codec.longest = codec.context + 3
    torch.testing.assert_close(codec.decode(codes), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(TesseraError) as error:
        codec.encode(sound(1))
    assert error.value.code == "media.codec-only-decodes"


@pytest.mark.parametrize("codec", [MimiCodec(mimi().double()), WaveDecoder(wave_decoder().double())])
def test_streamed_sound_equals_that_of_one_call(codec: MimiCodec | WaveDecoder) -> None:
    """Chunks are decoded while frames arrive; the context of later chunks begins after the first frame."""
    count = codec.context + 40
    codes = torch.randint(0, codec.size, (count, codec.codebooks), generator=torch.Generator().manual_seed(3))
    for frames in (0, 1, codec.ahead + 5, count):
        stream, parts, lengths = SoundStream(codec), [], []
        for number, frame in enumerate(codes[:frames], 1):
            part = stream.add(frame)
            if part is not None:
                parts.append(part)
                lengths.append(number)
        parts.append(stream.close())
        expected = codec.decode(codes[:frames])
        torch.testing.assert_close(torch.cat(parts).to(expected.dtype), expected)
        if frames == count:
            assert lengths[0] == codec.ahead + 5
            assert len(lengths) > 4
            heard = np.cumsum([0, *(len(part) / codec.stride for part in parts)])
            waits = np.diff([codec.ahead, *lengths])
            assert all(wait <= max(5, before / 2) for wait, before in zip(waits, heard, strict=False))


def test_unusable_codes_and_folders_are_refused(tmp_path: Path) -> None:
    codec = load_codec(mimi_folder(tmp_path / "codec"))
    for codes, code in (
        (torch.zeros(3, 9, dtype=torch.int64), "media.codes-shape"),
        (torch.zeros(3, dtype=torch.int64), "media.codes-shape"),
        (torch.full((3, 8), 64), "media.codes-range"),
        (torch.full((3, 8), -1), "media.codes-range"),
    ):
        with pytest.raises(TesseraError) as error:
            codec.decode(codes)
        assert error.value.code == code
    with pytest.raises(TesseraError) as error:
        codec.encode(sound(1), 9)
    assert error.value.code == "media.codec-codebooks"
    assert not has_codec(tmp_path)
    with pytest.raises(TesseraError) as error:
        load_codec(tmp_path)
    assert error.value.code == "media.no-codec"
    about = tmp_path / "codec" / "config.json"
    written = about.read_text()
    wrong_values = ({"hidden_size": "x"}, {"codebook_size": 63}, {"upsampling_ratios": [0]}, {"hidden_act": "none"})
    for wrong in (*wrong_values, {"num_quantizers": 10**9}, {"num_hidden_layers": -1}):
        about.write_text(json.dumps({**json.loads(written), **wrong}))
        with pytest.raises(TesseraError) as error:
            load_codec(tmp_path / "codec")
        assert error.value.code == "environment.wrong-value-in-file"
    about.write_text(written)
    file = tmp_path / "codec" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)
    with pytest.raises(TesseraError) as error:
        load_codec(tmp_path / "codec")
    assert error.value.code == "media.codec-unreadable"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TesseraError) as error:
        load_codec(tmp_path / "codec")
    assert error.value.code == "media.codec-unreadable"


@pytest.mark.parametrize("sizes", [{"intermediate_size": 1 << 30}, {"num_hidden_layers": 40}])
def test_sizes_that_are_not_those_of_the_files_allocate_nothing(
    tmp_path: Path, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file must not cost the memory that its config.json names: transformers draws it at random."""
    folder = mimi_folder(tmp_path)
    about = folder / "config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), **sizes}))
    module_class: Any = type(mimi())
    monkeypatch.setattr(module_class, "from_pretrained", lambda *_, **__: pytest.fail("the module is allocated"))
    with raises("media.codec-unreadable", "that config.json implies"):
        load_codec(folder)


def test_a_codec_of_other_names_is_refused_without_a_table_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    folder = mimi_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with raises("media.codec-unreadable"):
        load_codec(folder)
    assert [record.getMessage() for record in records] == []
