"""Tiny models of CSM beside those of transformers, whose own codec makes the codes, and conversations with speech."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chats import write_words
from parity import from_foreign, randomize
from torch import Tensor, nn
from transformers import CsmForConditionalGeneration

from tessera.core.batch import IGNORE, Batch
from tessera.core.sample import Message, Part, Sample
from tessera.core.spec import ModelSpec
from tessera.models.csm import SPEC
from tessera.models.csm.config import CSMConfig
from tessera.models.csm.processor import CSMProcessor
from tessera.models.speech.processor import SpokenSample

VOCABULARY, CODEBOOKS_OF_CODEC, CODES_OF_CODEC = 320, 6, 16
WORDS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")
TEXTS = ["[0] [1] [2] hello there, how are you? I am well.", "été 中文 12345"]
BEGIN, END, FRAME, END_OF_SPEECH = range(VOCABULARY - len(WORDS), VOCABULARY)


@dataclass(frozen=True)
class Shape:
    heads: tuple[int, int]
    depth_heads: tuple[int, int]
    codebooks: int
    hidden: int = 32
    layers: int = 2
    depth_hidden: int = 16
    depth_layers: int = 2
    codes: int = CODES_OF_CODEC + 3
    shared: bool = True
    end_code: int = 0
    rope: dict[str, Any] | None = None


SHAPES = (
    Shape((4, 2), (2, 1), 4),
    Shape((4, 4), (4, 2), 2, hidden=24, depth_hidden=32, depth_layers=1, shared=False, end_code=3),
    Shape((6, 1), (1, 1), 6, hidden=48, layers=1, depth_hidden=8, depth_layers=3, codes=CODES_OF_CODEC),
    Shape(
        (2, 2),
        (2, 2),
        3,
        layers=3,
        depth_hidden=24,
        rope={
            "rope_type": "llama3",
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 0.125,
            "high_freq_factor": 0.5,
        },
    ),
)


def config_of(number: int, **changes: Any) -> CSMConfig:
    shape = SHAPES[number]
    rope = {} if shape.rope is None else {"rope_scaling": shape.rope}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": 40,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "bos_token_id": BEGIN,
        "pad_token_id": FRAME,
        **rope,
    }
    depth = {
        "vocab_size": shape.codes,
        "hidden_size": shape.depth_hidden,
        "intermediate_size": 20,
        "num_hidden_layers": shape.depth_layers,
        "num_attention_heads": shape.depth_heads[0],
        "num_key_value_heads": shape.depth_heads[1],
        "rope_theta": 5e5,
        "max_position_embeddings": shape.codebooks + 1,
    }
    fields = {
        "text": text,
        "depth": depth,
        "num_codebooks": shape.codebooks,
        "codec_codes": CODES_OF_CODEC,
        "tie_codebooks_embeddings": shape.shared,
        "audio_token_id": FRAME,
        "audio_eos_token_id": END_OF_SPEECH,
        "codebook_eos_token_id": shape.end_code,
        "codebook_pad_token_id": None,
        **changes,
    }
    return CSMConfig.model_validate(fields)


def codec_config(codebooks: int) -> dict[str, Any]:
    """The fields of a small Mimi: 64 samples to a frame."""
    return {
        "model_type": "mimi",
        "sampling_rate": 24_000,
        "hidden_size": 16,
        "num_filters": 4,
        "num_residual_layers": 1,
        "upsampling_ratios": [4, 4, 2],
        "codebook_size": CODES_OF_CODEC,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_quantizers": codebooks,
        "num_semantic_quantizers": 1,
        "upsample_groups": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }


def hf_config(config: CSMConfig) -> Any:
    fields = {**config.to_hf(), "codec_config": codec_config(config.num_codebooks)}
    return transformers.AutoConfig.for_model(**fields)


def need_one_table(model: Any) -> None:
    """Skip where transformers does not share the table of codes, as before 5.21."""
    if model.backbone_model.embed_tokens.embed_audio_tokens.weight is not model.depth_decoder.model.embed_tokens.weight:
        pytest.skip("this version of transformers does not tie the tables of codes")


def reference_of(config: CSMConfig, seed: int) -> Any:
    model = CsmForConditionalGeneration._from_config(
        hf_config(config), attn_implementation="eager", dtype=torch.float32
    )
    if config.tie_codebooks_embeddings:
        need_one_table(model)
    randomize(model, seed)
    with torch.no_grad():  # its quantizers have buffers instead of parameters
        generator = torch.Generator().manual_seed(seed)
        for name, buffer in model.codec_model.named_buffers():
            if name.endswith("embed_sum"):
                buffer.normal_(generator=generator)
    return model.train()


def pair(number: int, seed: int, **changes: Any) -> tuple[ModelSpec, CSMConfig, Any, nn.Module]:
    """The family, its configuration, transformers' model, and ours with the same weights."""
    config = config_of(number, **changes)
    reference = reference_of(config, seed)
    return SPEC, config, reference, from_foreign(SPEC, config, dict(reference.state_dict())).train()


@cache
def words_folder() -> Path:
    return write_words(Path(tempfile.mkdtemp(prefix="csm-")), VOCABULARY, WORDS, TEXTS)


def processor_of(config: CSMConfig, **options: Any) -> CSMProcessor:
    return CSMProcessor.load(config, words_folder(), **options)


@dataclass(frozen=True)
class Spoken:
    """A conversation, its recordings, and how it was encoded."""

    sample: Sample
    clips: list[np.ndarray]
    encoded: SpokenSample


def spoken(config: CSMConfig, reference: Any, clips: int, seed: int) -> Spoken:
    """Turns of two speakers, whose recordings the codec of transformers' model encodes."""
    chance = np.random.default_rng(seed)
    messages, sounds = [], []
    for number in range(clips):
        sounds.append(chance.standard_normal(int(chance.integers(70, 400))).astype(np.float32))
        text = Part("text", ("hello there", "I am well", "été 12")[number % 3])
        codes = Part("codes", encoded(reference, sounds[-1]).numpy())
        messages.append(Message("assistant", (text, codes), str(number % 2)))
    sample = Sample(f"sample-{seed}", (*messages, Message("user", (Part("text", "how are you? 中文"),))))
    encoded_sample = processor_of(config).encode(sample, [part.value for part in sample.media()])
    assert isinstance(encoded_sample, SpokenSample)
    return Spoken(sample, sounds, encoded_sample)


def encoded(reference: Any, sound: np.ndarray) -> Tensor:
    """The codes [frames, codebooks] of a recording."""
    with torch.no_grad():
        return reference.codec_model.encode(torch.from_numpy(sound)[None, None]).audio_codes[0].T


@dataclass(frozen=True)
class Theirs:
    logits: Tensor  # [T, codes]
    others: Tensor  # [frames, codebooks - 1, codes]
    loss: Tensor  # sum over frames
    other_loss: Tensor  # mean over codebooks, summed over frames


def theirs(reference: Any, case: Spoken) -> Theirs:
    """What transformers' model computes from a sample's recordings, with losses in the type of the model."""
    tokens = case.encoded.tokens
    inputs: dict[str, Any] = {"input_ids": tokens[None]}
    if case.clips:
        ends = np.cumsum([len(sound) for sound in case.clips])
        values = torch.from_numpy(np.concatenate(case.clips))[None, None]
        spoken_at = (tokens == FRAME) | (tokens == END_OF_SPEECH)
        labels = tokens.where(spoken_at, IGNORE)[None]
        inputs |= {"input_values": values, "input_values_cutoffs": torch.from_numpy(ends)[None], "labels": labels}
    out = reference(**inputs)
    logits, zero = out.logits[0], out.logits.sum() * 0
    if not case.clips:
        return Theirs(logits, logits.new_zeros(0, reference.config.num_codebooks - 1, logits.shape[1]), zero, zero)
    targets = case.encoded.targets[:, 1:]
    following = targets[:, targets[0] != IGNORE]
    loss = nn.functional.cross_entropy(logits[:-1], targets[0], ignore_index=IGNORE, reduction="sum")
    others = out.depth_decoder_logits
    other = nn.functional.cross_entropy(others.transpose(1, 2), following[1:].T, reduction="sum")
    count = following.shape[1]
    torch.testing.assert_close(out.backbone_loss.double(), (loss / count).double(), rtol=1e-5, atol=1e-6)
    mean = other / following[1:].numel()
    torch.testing.assert_close(out.depth_decoder_loss.double(), mean.double(), rtol=1e-5, atol=1e-6)
    return Theirs(logits, others, loss, mean * count)


def packed(config: CSMConfig, cases: list[Spoken], padding: int = 0) -> Batch:
    samples = [case.encoded for case in cases]
    length = sum(len(sample.tokens) for sample in samples) + padding
    return processor_of(config).collate([samples], length)
