"""Tiny talkers of Qwen3-Omni in full models of transformers, and answers whose speech they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chats import write_words
from parity import from_foreign, randomize, spread
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration

from tessera.core.batch import Batch
from tessera.models.processing.tokenizer import load_tokenizer
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tessera.models.qwen3_omni.processor import QWEN3_OMNI
from tessera.models.qwen3_omni_talker import SPEC
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.qwen3_omni_talker.processor import TalkerProcessor
from tessera.models.qwen3_omni_talker.sequence import TalkerIds, spoken_sequence
from tessera.models.qwen3_omni_talker.thinker import WORDS
from tessera.models.speech.processor import SpokenSample
from tests.contract import qwen3_omni_cases

NEWLINE, FIRST_WORD, WORDS_END = 9, 20, 80
SYSTEM, USER, ASSISTANT = 10, 11, 12


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    sections: tuple[int, int, int]
    groups: int  # codebooks
    experts: tuple[int, int]  # and how many of them a token goes to
    hidden: int = 24
    layers: int = 2
    shared: int = 10
    normalized: bool = True
    codes: int = 30
    depth_layers: int = 2
    depth_heads: tuple[int, int] = (3, 1)
    depth_head_dim: int = 8
    thinker: int = 0  # of `qwen3_omni_cases.SHAPES`


SHAPES = (
    Shape(4, 2, 8, (2, 1, 1), 3, (4, 2)),
    Shape(4, 4, 12, (2, 2, 2), 2, (5, 3), hidden=20, normalized=False, depth_layers=1, depth_heads=(2, 2), thinker=1),
    Shape(6, 1, 8, (4, 0, 0), 5, (3, 1), layers=1, shared=32, normalized=False, codes=7, depth_head_dim=6, thinker=2),
    Shape(3, 3, 16, (4, 2, 2), 4, (6, 2), hidden=36, layers=3, depth_heads=(4, 2), depth_head_dim=10, thinker=3),
)


def config_of(number: int, **changes: Any) -> TalkerConfig:
    shape = SHAPES[number]
    experts = {
        "num_experts": shape.experts[0],
        "num_experts_per_tok": shape.experts[1],
        "moe_intermediate_size": 16,
        "norm_topk_prob": shape.normalized,
        "shared_expert_intermediate_size": shape.shared,
    }
    text = {
        "vocab_size": shape.codes + 12,
        "hidden_size": shape.hidden,
        "intermediate_size": 28,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "mrope_section": shape.sections,
        "experts": experts,
    }
    predictor = {
        "vocab_size": shape.codes,
        "hidden_size": shape.hidden,
        "intermediate_size": 18,
        "num_hidden_layers": shape.depth_layers,
        "num_attention_heads": shape.depth_heads[0],
        "num_key_value_heads": shape.depth_heads[1],
        "head_dim": shape.depth_head_dim,
    }
    control = ("pad_id", "bos_id", "eos_token_id", "nothink_id", "think_bos_id", "think_eos_id")
    fields = {
        "text": text,
        "depth": predictor,
        "thinker": qwen3_omni_cases.Qwen3Omni().config(shape.thinker).model_dump(),
        "vocoder": vocoder(shape.codes, shape.groups),
        "num_code_groups": shape.groups,
        "accept_hidden_layer": 1,
        "speaker_id": {"ethan": shape.codes + 8, "chelsie": shape.codes + 9},
        **{f"codec_{name}": shape.codes + number for number, name in enumerate(control)},
        "im_start_token_id": 13,
        "im_end_token_id": 14,
        "tts_pad_token_id": 15,
        "tts_bos_token_id": 16,
        "tts_eos_token_id": 17,
        "system_token_id": SYSTEM,
        "user_token_id": USER,
        "assistant_token_id": ASSISTANT,
        **changes,
    }
    return TalkerConfig.model_validate(fields)


def vocoder(codes: int, groups: int) -> dict[str, Any]:
    """The fields of a small code-to-wave model."""
    return {
        "codebook_size": codes,
        "num_quantizers": groups,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "decoder_dim": 16,
        "upsample_rates": [2, 2],
        "upsampling_ratios": [2],
    }


def hearing(number: int) -> dict[str, Any]:
    """Fields of a talker that reads states of the thinker from between its DeepStack layers and its last."""
    thinker = config_of(number).thinker.model_dump()
    taps = len(thinker["vision"]["deepstack_visual_indexes"])
    thinker["text"]["num_hidden_layers"] = taps + 3
    return {"thinker": thinker, "reads_media": True, "accept_hidden_layer": taps + 1}


SPEECH_WORDS = ["<|endoftext|>", "<tts_pad>", "<tts_bos>", "<tts_eos>", *QWEN3_OMNI.special_words()]
ROLES = ("user", "assistant", "system")


def config_with_words(
    folder: Path, words: Sequence[str], number: int = 0, media: bool = False, joint: bool = False
) -> TalkerConfig:
    """Write a tokenizer, and return a configuration whose ids are those of its tokens. `media`: see `hearing`. `joint`:
    the thinker is trained, too."""
    write_words(folder, 320, SPEECH_WORDS, [*ROLES, *words])
    tokenizer = load_tokenizer(folder)

    def id_of(word: str) -> int:
        (token,) = tokenizer.encode(word).ids
        return int(token)

    named = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", **{name: name for name in ROLES}}
    named |= {f"tts_{name}": f"<tts_{name}>" for name in ("pad", "bos", "eos")}
    more = hearing(number) if media or joint else {"thinker": config_of(number).thinker.model_dump()}
    if joint:
        more |= {"reads_media": False, "trains_thinker": True}
    thinker = more["thinker"]
    thinker["text"]["vocab_size"] = 320
    thinker |= {name: id_of(word) for name, word in Qwen3OmniConfig.token_fields.items()}
    return config_of(number, **more, **{f"{name}_token_id": id_of(word) for name, word in named.items()})


def reference_of(config: TalkerConfig, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A full model of transformers with random weights, which are the same for every dtype."""
    hf = AutoConfig.for_model(**config.to_hf())
    model = Qwen3OmniMoeForConditionalGeneration._from_config(hf, attn_implementation="eager", dtype=torch.float32)
    model.set_experts_implementation("eager")  # others take no float64
    randomize(model, seed)
    return model.to(dtype).train()


def weights_of(reference: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in spread(dict(reference.state_dict())).items() if "inv_freq" not in name}


def pair(number: int, dtype: torch.dtype = torch.float32) -> tuple[TalkerConfig, Any, Any]:
    config = config_of(number)
    reference = reference_of(config, 7 + number, dtype)
    model = from_foreign(SPEC, config, weights_of(reference)).to(dtype)
    return config, reference, model


# ---------------------------------------------------------------------------------------------- conversations


@dataclass(frozen=True)
class Conversation:
    tokens: tuple[int, ...]  # to the end of the answer's text
    codes: np.ndarray  # [frames, codebooks]


def conversation(config: TalkerConfig, seed: int, frames: int, *, earlier: bool = False) -> Conversation:
    """A question and an answer with speech; `earlier`: after a system message and another turn of both."""
    chance = np.random.default_rng(seed)
    start, end = config.im_start_token_id, config.im_end_token_id

    def turn(role: int, count: int) -> list[int]:
        words = chance.integers(FIRST_WORD, WORDS_END, count).tolist()
        return [start, role, NEWLINE, *words, end, NEWLINE]

    before = [*turn(SYSTEM, 3), *turn(USER, 4), *turn(ASSISTANT, 2)] if earlier else []
    answer = turn(ASSISTANT, int(chance.integers(1, max(2, frames))))[:-2]
    codes = chance.integers(0, config.depth.vocab_size, (frames, config.num_code_groups))
    return Conversation((*before, *turn(USER, int(chance.integers(2, 9))), *answer), codes)


def conversations(config: TalkerConfig) -> list[Conversation]:
    return [
        conversation(config, 0, 9),
        conversation(config, 1, 1),
        conversation(config, 2, 6, earlier=True),
    ]


def sequence_of(config: TalkerConfig, talk: Conversation, speaker: str = "ethan") -> SpokenSample:
    ids = TalkerIds.of_model(config)
    return spoken_sequence("row", talk.tokens, talk.codes, ids, ids.speaker(speaker))


def packed(config: TalkerConfig, talks: Sequence[Conversation], words: nn.Module, padding: int = 0) -> Batch:
    """The conversations in one row. `words`: the thinker's embedding."""
    samples = [sequence_of(config, talk) for talk in talks]
    length = sum(len(sample.tokens) for sample in samples) + padding
    processor = object.__new__(TalkerProcessor)
    object.__setattr__(processor, "sizes", (config.depth.vocab_size,) * config.num_code_groups)
    object.__setattr__(processor, "_pad", 0)
    batch = processor.collate([samples], length)
    batch = replace(batch, seeds=(0,))
    return batch.with_tensors(**{WORDS: words(batch["tokens"]).detach()})


# ---------------------------------------------------------------------------------------------- transformers' side


@dataclass(frozen=True)
class Spoken:
    """What transformers' modules compute for an answer: logits of the main head, and of each other codebook."""

    logits: Tensor  # [T, codes]
    others: Tensor  # [codebooks - 1, frames, codes]
    loss: Tensor  # sum over frames and the end of speech
    other_loss: Tensor  # mean over codebooks, summed over frames


@dataclass(frozen=True)
class Beginning:
    """What transformers' `generate` gives the talker: embeddings before the first frame, and those beside frames."""

    inputs: Tensor  # [1, T, D]
    trailing: Tensor  # [1, words, D]
    pad: Tensor  # [1, 1, D]


@dataclass(frozen=True)
class Heard:
    """Media of a conversation: where their tokens are, the thinker's states, and the positions of the talker."""

    mask: Tensor  # [L]
    states: Tensor  # [L, W]
    positions: Tensor  # [3, T]
    trained: bool = False  # whether gradients of the talker reach the thinker


def beginning(
    config: TalkerConfig, model: Any, tokens: Sequence[int], speaker: str, heard: Heard | None = None
) -> Beginning:
    talker, ids = model.talker, torch.tensor([list(tokens)])
    embed = model.thinker.get_input_embeddings()
    trained = heard is not None and heard.trained
    words = embed(ids) if trained else embed(ids).detach()
    mask = torch.zeros(len(tokens), dtype=torch.bool) if heard is None else heard.mask
    states = words[0] if heard is None else heard.states
    special = torch.tensor([[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]])
    special_words = embed(special) if trained else embed(special).detach()
    bos, eos, pad = talker.text_projection(special_words).chunk(3, dim=1)
    starts = [n for n, token in enumerate(tokens) if token == config.im_start_token_id]
    users = [
        model._get_talker_user_parts(start, end, mask[None], states[None], words)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
        if tokens[start + 1] == config.user_token_id
    ]
    header, _, trailing = model._get_talker_assistant_parts(
        starts[-1], len(tokens), config.speaker_id[speaker], words, pad, bos, eos
    )
    return Beginning(torch.cat([*users, header], dim=1), trailing, pad)


def theirs(
    config: TalkerConfig, model: Any, talk: Conversation, speaker: str = "ethan", heard: Heard | None = None
) -> Spoken:
    """Teacher forcing, step by step as `generate` does it: the embeddings of a frame and of its text are added."""
    talker, begin = model.talker, beginning(config, model, talk.tokens, speaker, heard)
    codes = torch.from_numpy(talk.codes)
    tables = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
    frames = []
    for step, frame in enumerate(codes):
        embedding = torch.stack([table(code) for table, code in zip(tables, frame, strict=True)]).sum(0)
        frames.append(embedding + (begin.trailing[0, step] if step < begin.trailing.shape[1] else begin.pad[0, 0]))
    inputs = torch.cat([begin.inputs, torch.stack(frames)[None]], dim=1)
    positions = torch.arange(inputs.shape[1]).expand(3, -1) if heard is None else heard.positions
    hidden = talker.model(inputs_embeds=inputs, position_ids=positions[:, None])
    states = hidden.last_hidden_state[0]
    logits = talker.codec_head(states)
    spoken = states[-len(codes) - 1 : -1]
    read = torch.stack([table(codes[:, n]) for n, table in enumerate(tables[:-1])], dim=1)
    predictor = talker.code_predictor
    decoded = predictor.model(inputs_embeds=torch.cat([spoken[:, None], read], dim=1)).last_hidden_state
    others = torch.stack([head(decoded[:, n]) for n, head in enumerate(predictor.lm_head, 1)])
    labels = torch.cat([codes[:, 0], torch.tensor([config.codec_eos_token_id])])
    loss = nn.functional.cross_entropy(logits[-len(labels) :], labels, reduction="sum")
    other = sum(nn.functional.cross_entropy(o, codes[:, n], reduction="sum") for n, o in enumerate(others, 1))
    return Spoken(logits, others, loss, other / len(others))


@torch.no_grad()
def spoken_by_transformers(
    config: TalkerConfig, model: Any, tokens: Sequence[int], speaker: str, most: int, penalty: float = 1.0
) -> Tensor:
    """The codes [frames, codebooks] that transformers' talker generates greedily."""
    begin = beginning(config, model, tokens, speaker)
    first, last = config.depth.vocab_size, config.text.vocab_size
    result = model.talker.generate(
        inputs_embeds=begin.inputs,
        trailing_text_hidden=begin.trailing,
        tts_pad_embed=begin.pad,
        talker_input_ids=torch.full(begin.inputs.shape[:2], config.tts_pad_token_id),
        attention_mask=torch.ones(begin.inputs.shape[:2], dtype=torch.int64),
        do_sample=False,
        max_new_tokens=most,
        repetition_penalty=penalty,
        eos_token_id=config.codec_eos_token_id,
        pad_token_id=config.codec_pad_id,
        suppress_tokens=[code for code in range(first, last) if code != config.codec_eos_token_id],
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    frames = [hidden[-1] for hidden in result.hidden_states if hidden[-1] is not None]
    return torch.cat(frames) if frames else torch.empty(0, config.num_code_groups, dtype=torch.int64)
