"""The processor of Whisper: features and labels as transformers has them in fine-tuning, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE
from whisper_cases import (
    END,
    POSITIONS,
    RATE,
    SECONDS,
    START,
    TEXTS,
    config_of,
    extractor,
    sounds,
    write_tokenizer_files,
)

from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Region, Sample
from tessera.models.processing.transcription import transcript, transcription_instruction
from tessera.models.whisper.config import LEAST_TOKENS
from tessera.models.whisper.languages import CODES, language_code
from tessera.models.whisper.model import frames_of
from tessera.models.whisper.processor import WhisperProcessor
from tessera.nn.encoder_decoder import MEMORY
from tessera.tools.data_doctor.look import show
from tessera.tools.data_doctor.sound import Sound
from tests.errors import raises

EN, DE, TRANSLATE, TRANSCRIBE, NO_STAMPS, ZERO = START + 1, START + 2, START + 3, START + 4, START + 8, START + 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("whisper")
    write_tokenizer_files(target, config_of(0)[1])
    return target


def processor(folder: Path, **options: Any) -> WhisperProcessor:
    return WhisperProcessor.load(config_of(0)[1], folder, **options)


def talk(sound: Any, text: str | None = None, said: str = "", id: str = "s") -> Sample:
    words = [Part("text", said)] if said else []
    question = Message("user", (Part("audio", sound), *words))
    return Sample(id, (question,) if text is None else (question, Message("assistant", (Part("text", text),))))


def labels_of(processor: WhisperProcessor, text: str, said: str = "") -> tuple[list[int], list[int]]:
    (sound,) = sounds(0, 1)
    encoded = processor.encode(talk(sound, text, said), [sound])
    return encoded.tokens.tolist(), encoded.labels.tolist()


def test_labels_are_those_of_fine_tuning_in_transformers(folder: Path) -> None:
    """They are the transcript of its tokenizer after the tokens for language, task and no time stamps. The start token
    is not among them: transformers' class puts it before the labels to get its input."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in TEXTS:
        words = tokenizer(text, add_special_tokens=False).input_ids
        tokens, labels = labels_of(processor(folder), text)
        expected = [EN, TRANSCRIBE, NO_STAMPS, *words, END]
        assert tokens == [START, *expected, *[END] * (len(tokens) - 1 - len(expected))]
        assert labels == [IGNORE, *expected, *[IGNORE] * (len(labels) - 1 - len(expected))]
        assert len(tokens) == LEAST_TOKENS
        mquestion = labels_of(processor(folder, train_prefix=False), text)[1]
        assert mquestion == [IGNORE] * 4 + labels[4:]


def test_features_are_those_of_transformers(folder: Path) -> None:
    clips, ours = sounds(0, 3), processor(folder)
    items = [ours.encode(talk(clip, "ten!"), [clip]) for clip in clips]
    batch = ours.collate([items], 4 * LEAST_TOKENS)
    expected = extractor(config_of(0)[1])(clips, sampling_rate=RATE, return_tensors="np").input_features
    for part, theirs in zip(torch.split(batch["mel"], POSITIONS), expected, strict=True):
        np.testing.assert_allclose(frames_of(part).T.numpy(), theirs, rtol=1e-5, atol=1e-5)
    assert batch.segments[MEMORY].lengths == (POSITIONS, POSITIONS, POSITIONS, 0), "padding attends to nothing"
    assert batch.segments["text"].lengths == (LEAST_TOKENS,) * 4
    assert batch["positions"].tolist() == list(range(LEAST_TOKENS)) * 4
    assert batch.counts["audio_frames"] == 3 * POSITIONS


def test_positions_of_long_padding_stay_in_the_table(folder: Path) -> None:
    (clip,) = sounds(0, 1)
    ours = processor(folder)
    batch = ours.collate([[ours.encode(talk(clip, "ten!"), [clip])]], 500)
    assert int(batch["positions"].max()) < ours.max_length


def test_measures_need_no_sound(folder: Path) -> None:
    (clip,) = sounds(0, 1)
    for text in ("ten!", "seven eight nine " * 9):
        sample = talk(clip, text)
        measured = processor(folder).measure(sample, [MediaSize(0, 0, 0, samples=len(clip))])
        encoded = processor(folder).encode(sample, [clip])
        assert measured == {**encoded.counts, "audio_pairs": POSITIONS**2}


def test_a_sample_names_its_language_and_task(folder: Path) -> None:
    for said in ("de translate", "translate <|de|>", "DE <|translate|>"):
        assert labels_of(processor(folder), "ten!", said)[0][1:4] == [DE, TRANSLATE, NO_STAMPS]
    assert labels_of(processor(folder, language="de"), "ten!", "translate")[0][1:3] == [DE, TRANSLATE]
    with raises("data.unknown-language") as caught:
        labels_of(processor(folder), "ten!", "translat")
    assert caught.value.nearest == "translate"
    with raises("data.unknown-language"):
        processor(folder, language="fr")


def test_languages_have_the_names_of_transformers() -> None:
    assert TO_LANGUAGE_CODE == CODES
    assert [language_code(word) for word in ("Haitian Creole", "<|YUE|>", "moldavian", "xx")] == [
        "ht",
        "yue",
        "ro",
        "xx",
    ]


def test_time_stamps_of_a_transcript_become_tokens(folder: Path) -> None:
    ours = processor(folder)
    tokens, labels = labels_of(ours, "<|0.00|>ten!<|0.60|>")
    assert tokens[1:4] == [EN, TRANSCRIBE, ZERO]
    assert ZERO + 30 in labels
    assert NO_STAMPS not in tokens
    stamped = processor(folder, timestamps=True)
    assert stamped.decode([token for token in labels if token >= 0][2:]) == "<|0.00|>ten!<|0.60|>"
    assert ours.decode([token for token in labels if token >= 0][2:]) == "ten!"
    for wrong in ("<|0.01|>ten!", "ten!<|7.00|>"):
        with raises("data.unknown-time-stamp"):
            labels_of(ours, wrong)


def test_words_of_a_transcript_never_become_other_special_tokens(folder: Path) -> None:
    tokens, _ = labels_of(processor(folder), "<|de|><|nospeech|>")
    assert DE not in tokens
    assert tokens.count(START) == 1
    assert START + 7 not in tokens


def test_prompts_end_before_the_transcript(folder: Path) -> None:
    (clip,) = sounds(0, 1)
    for options, expected in (
        ({}, [START, TRANSCRIBE, NO_STAMPS]),
        ({"language": "English"}, [START, EN, TRANSCRIBE, NO_STAMPS]),
        ({"timestamps": True, "language": "de"}, [START, DE, TRANSCRIBE]),
    ):
        batch = processor(folder, **options).prompt([talk(clip, "ten!")], [[clip]])
        assert batch["tokens"].tolist() == expected


def test_models_of_english_have_no_tokens_for_language_and_task(folder: Path, tmp_path: Path) -> None:
    write_tokenizer_files(tmp_path, config_of(0)[1])
    (tmp_path / "generation_config.json").write_text('{"is_multilingual": false}')
    assert labels_of(processor(tmp_path), "ten!")[0][:2] == [START, NO_STAMPS]
    with raises("data.unknown-language"):
        transcription_instruction(processor(tmp_path), "de", None, False)


def test_requests_for_a_transcript_name_its_language(folder: Path) -> None:
    ours = processor(folder)
    assert [transcription_instruction(ours, name, None, False) for name in (None, "DE", "german")] == ["", "de", "de"]
    said = transcription_instruction(ours, "de", None, True)
    (clip,) = sounds(0, 1)
    assert ours.prompt([talk(clip, said=said)], [[clip]])["tokens"].tolist() == [START, DE, TRANSCRIBE]
    assert transcript(ours, " ten!") == ("ten!", None)
    assert transcript(ours, "<|de|><|0.00|> ten!<|0.60|>") == ("<|0.00|> ten!<|0.60|>", "de")
    with raises("data.unknown-language"):
        transcription_instruction(ours, "fr", None, False)
    with raises("generation.option-without-effect"):
        transcription_instruction(ours, None, "Names: Ada", False)


def test_the_doctor_shows_a_transcript(folder: Path) -> None:
    """A recording takes no tokens, and the end of the transcript is among the tokens that are trained on."""
    pytest.importorskip("av")
    ours, clip = processor(folder), sounds(0, 1)[0]
    sound = Sound(clip, RATE, len(clip) / RATE)
    view = show("a.jsonl:1", talk(clip, "ten!"), [clip], [MediaSize(0, 0, 0, samples=len(clip))], ours, [sound])
    assert [thumb.tokens for thumb in view.media] == [None]
    trained = "".join(span.text for span in view.spans if span.kind == "trained")
    assert trained == "<|en|><|transcribe|><|notimestamps|>ten!<|endoftext|>"
    assert view.spans[-1].kind == "media", "padding"


def test_what_is_no_transcript_of_one_recording_is_refused(folder: Path) -> None:
    (clip,) = sounds(0, 1)
    audio, text = Part("audio", clip), Part("text", "ten!")
    ours = processor(folder)
    answer = Message("assistant", (text,))
    for messages in (
        (Message("user", (text,)), answer),
        (Message("user", (audio, audio)), answer),
        (Message("system", (text,)), Message("user", (audio,)), answer),
        (Message("user", (audio,)), answer, Message("user", (text,)), answer),
        (Message("user", (text,)), Message("assistant", (audio,))),
        (Message("user", (audio,)), Message("assistant", (Part("text", "<bbox>", (Region((0, 0)),)),))),
    ):
        sample = Sample("s", messages)
        with raises("data.not-a-transcript"):
            ours.encode(sample, [clip for _ in sample.media()])
    with raises("media.kind-not-supported"):
        ours.encode(Sample("s", (Message("user", (Part("image", clip),)), answer)), [clip])
    long = np.zeros(SECONDS * RATE + 1, dtype=np.float32)
    with raises("data.recording-too-long"):
        ours.encode(talk(long, "ten!"), [long])
    with raises("data.transcript-too-long"):
        ours.encode(talk(clip, "seven " * 40), [clip])


def test_settings_survive_a_folder(folder: Path, tmp_path: Path) -> None:
    ours = processor(folder)
    ours.save(tmp_path / "saved")
    assert processor(tmp_path / "saved").fingerprint == ours.fingerprint
    assert processor(folder, language="de").fingerprint != ours.fingerprint
    loaded = transformers.WhisperProcessor.from_pretrained(tmp_path / "saved")
    assert loaded.feature_extractor.to_dict()["nb_max_frames"] == 2 * POSITIONS
    other = config_of(1)[1]  # sixteen bins, this folder has eight
    with raises("media.audio-features-differ"):
        WhisperProcessor.load(other, tmp_path / "saved")


def test_tokens_that_differ_from_the_model_are_refused(folder: Path) -> None:
    _, config = config_of(0)
    for changes, code in (
        ({"decoder_start_token_id": 7}, "tokenizer.token-id-mismatch"),
        ({"vocab_size": 100}, "tokenizer.vocabulary-too-large"),
    ):
        text = config.text.model_copy(update=changes)
        with raises(code):
            WhisperProcessor.load(config.model_copy(update={"text": text}), folder)
