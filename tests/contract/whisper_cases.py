"""Tiny Whisper models beside those of transformers, with recordings of noise and transcripts of random tokens."""

from __future__ import annotations

import json
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from parity import from_foreign, randomize, saved
from torch import Tensor, nn

from tessera.config.run_config import ModelSection
from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.spec import ModelSpec
from tessera.models import resolve
from tessera.models.audio.features import LogMel, mel_windows
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.nn.encoder_decoder import MEMORY

SECONDS, RATE = 1, 16_000
POSITIONS = 50  # of the encoder: one second
TEXTS = ("one two three", "seven eight nine", "Four, five and six.", "ten!")
STAMPS = [f"<|{number * 0.02:.2f}|>" for number in range(POSITIONS + 1)]
WORDS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
SPECIAL = [*WORDS, "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>", *STAMPS]
VOCABULARY = 256 + 60 + len(SPECIAL)
END, START = VOCABULARY - len(SPECIAL), VOCABULARY - len(SPECIAL) + 1
# What varies: bins, encoder layers, encoder heads, decoder layers, decoder heads, head size, tied
SHAPES = ((8, 2, 4, 2, 2, 16, True), (16, 1, 2, 3, 4, 8, True), (8, 3, 1, 1, 2, 8, False), (20, 2, 3, 2, 6, 4, True))


def config_of(number: int, **changes: Any) -> tuple[ModelSpec, Any]:
    bins, encoder, encoder_heads, decoder, decoder_heads, size, tied = SHAPES[number]
    ids = {"decoder_start_token_id": START, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": decoder_heads * size,
        "num_hidden_layers": decoder,
        "num_attention_heads": decoder_heads,
        "intermediate_size": 40,
        "max_target_positions": 48,
        **ids,
    }
    audio = {
        "num_mel_bins": bins,
        "num_hidden_layers": encoder,
        "num_attention_heads": encoder_heads,
        "intermediate_size": 24,
        "max_source_positions": POSITIONS,
    }
    fields = {"text": text, "audio": audio, "tie_word_embeddings": tied, "attention": "eager", **changes}
    spec, config = resolve(ModelSection(family="whisper", config=fields))
    return spec, config


def pair(number: int, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Any, Any, nn.Module]:
    """The family, its configuration, the class of transformers and our model, with the same random weights."""
    spec, config = config_of(number)
    hf = transformers.WhisperConfig(**{k: v for k, v in config.to_hf().items() if k != "architectures"})
    reference = transformers.WhisperForConditionalGeneration._from_config(hf, attn_implementation="eager")
    randomize(reference, number, 0.2)
    model = from_foreign(spec, config, saved(reference))
    return spec, config, reference.to(dtype).train(), model.to(dtype).train()


def sounds(seed: int, count: int = 3, seconds: float = SECONDS) -> list[np.ndarray]:
    """Clips of different lengths: tones in noise."""
    chance = np.random.default_rng(seed)
    clips = []
    for number in range(count):
        at = np.arange(int(RATE * seconds * (1 - 0.3 * (number % 3)))) / RATE
        noise = 0.05 * chance.standard_normal(len(at))
        clips.append((noise + 0.4 * np.sin(2 * np.pi * 300 * (number + 1) * at)).astype(np.float32))
    return clips


def extractor(config: Any) -> Any:
    """The feature extractor of transformers for the windows of our tiny models."""
    return transformers.WhisperFeatureExtractor(
        feature_size=config.audio.num_mel_bins, chunk_length=SECONDS, n_fft=400, hop_length=160, sampling_rate=RATE
    )


def transcripts(seed: int, lengths: tuple[int, ...] = (13, 5, 29)) -> list[Tensor]:
    """Labels as in fine-tuning by transformers: tokens for language, task and no time stamps, words, the end."""
    chance = torch.Generator().manual_seed(seed)
    prefix = torch.tensor([START + 1, START + 4, START + 8])
    return [
        torch.cat([prefix, torch.randint(0, END, (length - 4,), generator=chance), torch.tensor([END])])
        for length in lengths
    ]


def theirs(config: Any, reference: Any, clips: list[np.ndarray], labels: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The logits and the loss of transformers' class, from a padded batch."""
    features = extractor(config)(clips, sampling_rate=RATE, return_tensors="pt").input_features
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE)
    out = reference(input_features=features.to(reference.dtype), labels=padded)
    return [logits[: len(one)] for logits, one in zip(out.logits, labels, strict=True)], out.loss


def packed(config: Any, clips: list[np.ndarray], labels: list[Tensor], padding: int = 0) -> Batch:
    """The same as one row of ours: the input of each transcript is its start token, then all labels but the last."""
    lengths = [len(one) for one in labels]
    mel = LogMel(bins=config.audio.num_mel_bins, seconds=SECONDS)
    parts = [mel_windows(mel(clip, mel.longest), POSITIONS, 2 * POSITIONS, 2, 2) for clip in clips]
    tokens = torch.cat([*(torch.cat([torch.tensor([START]), one[:-1]]) for one in labels), torch.full((padding,), END)])
    tail = [padding] if padding else []
    return Batch(
        {
            "tokens": tokens,
            "labels": torch.cat([*labels, torch.full((padding,), IGNORE)]),
            "positions": torch.cat([torch.arange(length) for length in [*lengths, *tail]]),
            **{name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]},
        },
        {
            "text": Segments.of([*lengths, *tail]),
            "audio": Segments.of([POSITIONS] * len(clips)),
            MEMORY: Segments.of([POSITIONS] * len(clips) + [0] * len(tail)),
        },
        seeds=(0,),
    )


def in_double(batch: Batch) -> Batch:
    mel = batch["mel"].double()
    return replace(batch, tensors={**batch.tensors, "mel": mel})


def write_tokenizer_files(folder: Path, config: Any) -> None:
    """A tokenizer, feature settings and generation settings, as a Whisper folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(TEXTS, VOCABULARY, SPECIAL).save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor(config).to_dict()))


def write_samples(folder: Path, count: int, texts: tuple[str, ...] = TEXTS) -> Path:
    """Recordings of tones with transcripts, as conversations of a recording and an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, clip in enumerate(sounds(0, count)):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, len(clip), "NONE", ""))
            file.writeframes((clip.clip(-1, 1) * 32767).astype("<i2").tobytes())
        question = {"role": "user", "content": [{"type": "audio", "audio": f"{number}.wav"}]}
        rows.append({"messages": [question, {"role": "assistant", "content": texts[number % len(texts)]}]})
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder / "samples.jsonl"
