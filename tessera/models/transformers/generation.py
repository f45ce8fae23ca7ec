"""Generation with the `generate` method of a class of transformers, which handles its own cache and positions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.errors import TesseraError

Choose = Callable[[Tensor], Tensor]  # logits [rows, vocabulary] -> tokens [rows]


class _Chosen:
    """Force the token that `choose` selects at each step, as a logits processor, and record the tokens of each row."""

    def __init__(self, rows: int, stop_tokens: Collection[int], choose: Choose, on_token: Any) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.done = [False] * rows
        self.called = False
        self._stops, self._choose, self._on_token = set(stop_tokens), choose, on_token

    def add(self, chosen: Tensor) -> None:
        for row, token in enumerate(chosen.tolist()):
            if self.done[row] or token in self._stops:
                self.done[row] = True
                continue
            self.tokens[row].append(token)
            if self._on_token is not None:
                self._on_token(row, token)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.called = True
        chosen = self._choose(scores)
        self.add(chosen)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen.unsqueeze(-1), 0.0)


@torch.no_grad()
def continue_prompts(
    module: Any,
    batch: Batch,
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    choose: Choose,
    greedy: bool = False,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return the generated tokens of each prompt, without the stop token.

    `greedy`: `choose` selects the most likely token, as the class does by default.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    rows = len(batch["input_ids"])
    chosen = _Chosen(rows, stop_tokens, choose, on_token)
    if not rows or not max_new_tokens:
        return chosen.tokens
    if not module.can_generate():
        raise TesseraError(
            f"{type(module).__name__} has no generate method for text",
            fix="set model.config.class to a class for causal language models",
            code="generation.class-cannot-generate",
        )

    def finished(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor(chosen.done, device=ids.device)

    inputs = {name: tensor for name, tensor in batch.tensors.items() if "." not in name}
    dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    out = module.generate(
        **{name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()},
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, use_cache=True, pad_token_id=0, eos_token_id=None
        ),
        logits_processor=LogitsProcessorList([chosen]),
        stopping_criteria=StoppingCriteriaList([finished]),
    )
    if not chosen.called:  # a class with its own `generate` may ignore logits processors
        if not greedy:
            raise TesseraError(
                f"{type(module).__name__}.generate samples tokens itself, so only greedy decoding is supported",
                where="temperature",
                allowed=[0],
                code="generation.own-sampling",
            )
        for step in out[:, batch["input_ids"].shape[1] :].unbind(1):
            chosen.add(step)
    return chosen.tokens
