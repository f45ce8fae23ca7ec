"""Prompts of every native family with the tokens that transformers generates, and a comparison of answers with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import torch
from language_cases import VOCAB, experts_of, text
from parity import from_foreign, reference_model, saved
from torch import Tensor
from vision_language import Case, packed_text
from vision_language_families import VISION_LANGUAGE

from tessera.config.run_config import ModelSection
from tessera.core.batch import Batch, Segments
from tessera.models import resolve
from tests.close import rounding, size

TEXT: dict[str, dict[str, Any]] = {
    "llama": text(2, 4, 2, 8),
    "qwen2": text(2, 4, 2, 8),
    "qwen3": text(2, 4, 2, 8, head_dim=8),
    "qwen3 with experts": text(2, 4, 2, 8, head_dim=8, experts=experts_of(6, 2)),
}
FAMILIES = [*TEXT, *VISION_LANGUAGE]
MOST_NEW = 10
_K = 3.0  # as in `tests.close.assert_as_close`: how much larger our rounding may be than that of transformers


def shapes_of(name: str) -> range:
    """Return the numbers of the tiny models of a family."""
    return range(1 if name in TEXT else len(VISION_LANGUAGE[name].shapes))


def main_shape(name: str) -> int:
    """Return the first tiny model that takes videos, if the family does."""
    if name in TEXT:
        return 0
    return next(shape for shape in shapes_of(name) if "video" in VISION_LANGUAGE[name].media(shape))


@dataclass(frozen=True)
class Models:
    """Hold one tiny model as transformers' and as ours. `cases`: makes prompts of the kinds of media."""

    reference: Any
    model: Any
    case: Any  # (number) -> kind of media, batch, inputs of transformers
    kinds: tuple[str, ...]


@cache
def models_of(name: str, shape: int = 0) -> Models:
    if name in TEXT:
        spec, config = resolve(ModelSection(family=name.split()[0], config={"text": TEXT[name], "attention": "eager"}))
        reference = reference_model(config, 4).eval()
        model = from_foreign(spec, config, saved(reference)).eval()
        return Models(reference, model, _text_case, ("text",))
    family = VISION_LANGUAGE[name]
    pair = family.pair(shape, 4)
    media = family.media(shape)
    kinds = tuple(kind for kind in media if (name, kind) != ("glm4v", "mixed"))  # transformers does not generate there

    def case(number: int) -> tuple[str, Batch, dict[str, Tensor]]:
        kind = kinds[number % len(kinds)]
        sample = family.case(pair, media[kind], 100 + number)
        inputs = family.inputs(pair, sample)
        inputs.pop("position_ids", None)
        return kind, family.pack(pair.config, [sample]), inputs

    return Models(pair.reference.eval(), pair.model.eval(), case, kinds)


def _text_case(number: int) -> tuple[str, Batch, dict[str, Tensor]]:
    length = Random(number).randint(3, 30)
    tokens = torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(number))
    case = Case(tokens, tokens, torch.arange(length), None)
    return "text", Batch(*packed_text([case], 0)), {"input_ids": tokens[None]}


@dataclass(frozen=True)
class Tie:
    """Hold how far apart two logits are in float64, and how far rounding may move them."""

    margin: float
    limit: float


@dataclass(frozen=True)
class Reference:
    """Hold a prompt with the tokens that transformers generates, and how far its two largest logits are apart."""

    model: Any
    kind: str
    prompt: Batch
    inputs: dict[str, Tensor]
    tokens: list[int]
    margins: list[float]  # of each token, as a share of the size of the logits

    def continued(self, count: int) -> Batch:
        """Return the prompt with the first tokens of its answer, as a later turn of a conversation has it."""
        positions, length = self.prompt["positions"], self.prompt["tokens"].numel()
        after = positions[..., -1].max() + 1 + torch.arange(count)
        tensors = {name: tensor for name, tensor in self.prompt.tensors.items() if name not in ("labels", "trained")}
        tensors["tokens"] = torch.cat([self.prompt["tokens"], torch.tensor(self.tokens[:count], dtype=torch.int64)])
        tensors["positions"] = torch.cat([positions, after.expand(*positions.shape[:-1], -1)], dim=-1)
        return Batch(tensors, {**self.prompt.segments, "text": Segments.of([length + count])})

    def ties(self, start: int, tokens: Sequence[int]) -> list[Tie]:
        """Compare an answer to `continued(start)`, token by token. Return the ties that it decided otherwise.

        Where a token differs, both must be equally likely within rounding, and transformers continues with the token
        of the answer: the tokens after a tie are compared, too.
        """
        ties, expected = [], self.tokens[start : start + len(tokens)]
        while differing := [at for at, token in enumerate(tokens) if token != expected[at]]:
            at = differing[0]
            so_far = _extended(self.inputs, [*self.tokens[:start], *tokens[:at]])
            ties.append(_measured_tie(self.model, so_far, tokens[at]))
            expected = [*tokens[: at + 1]]
            if missing := len(tokens) - len(expected):
                expected += _generate(self.model, _extended(so_far, tokens[at : at + 1]), missing)[0]
        return ties


@cache
def references_of(name: str, shape: int, count: int) -> list[Reference]:
    """Return prompts with transformers' answers. Tests of one process share them."""
    make = partial(_reference_of, name, shape)
    return [make(number) for number in range(count)]


@cache
def _reference_of(name: str, shape: int, number: int) -> Reference:
    models = models_of(name, shape)
    kind, prompt, inputs = models.case(number)
    return Reference(models.reference, kind, prompt, inputs, *_generate(models.reference, inputs, MOST_NEW))


@torch.no_grad()
def _generate(model: Any, inputs: dict[str, Tensor], count: int) -> tuple[list[int], list[float]]:
    """Return transformers' tokens, and the margins of their logits."""
    out = model.generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=10**6,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)
    largest = logits.topk(2).values
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, ((largest[:, 0] - largest[:, 1]) / size(logits)).tolist()


def _extended(inputs: dict[str, Tensor], tokens: Sequence[int]) -> dict[str, Tensor]:
    more = torch.tensor([tokens], dtype=torch.int64)
    extended = {**inputs, "input_ids": torch.cat([inputs["input_ids"], more], dim=1)}
    if "mm_token_type_ids" in inputs:
        extended["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(more)], dim=1)
    return extended


@torch.no_grad()
def _measured_tie(model: Any, inputs: dict[str, Tensor], token: int) -> Tie:
    """Return by how much a token is less likely than the likeliest one. Raise if that is more than rounding."""
    exact_inputs = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    exact = copy.deepcopy(model).double()(**exact_inputs).logits[0]
    peer = model(**inputs).logits[0]
    error = float((peer.double() - exact).abs().max())
    least = rounding(k=0.5) * size(exact)  # the peer may be nearly exact by luck
    tie = Tie(float(exact[-1].max() - exact[-1][token]), 2 * _K * max(error, least))  # both logits have an error
    assert tie.margin <= tie.limit, f"token {token} is less likely by {tie.margin:.3g}, rounding is {tie.limit:.3g}"
    return tie
