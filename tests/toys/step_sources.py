"""Step sources without a data set: a list of batches, and a rollout that samples with the weights being trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tessera.core.batch import Batch
from tessera.core.step_source import StepSource
from tessera.core.task import Losses, LossTerm, Task
from tessera.runtime.distributed import World
from tessera.runtime.rng import generator

VOCABULARY, LENGTH, WANTED = 6, 5, 3


class ListSteps(StepSource):
    """Give the batches of a list, over and over."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.at = 0

    def start(self, step: int, row: int) -> None:
        self.at = step

    def next_step(self) -> list[Batch]:
        self.at += 1
        return [self.batches[(self.at - 1) % len(self.batches)]]


class Policy(nn.Module):
    """Predict the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


class Rollout(StepSource):
    """Sample sequences from the model and reward the share of one token. The mean reward so far is its state."""

    def __init__(self, sequences: int = 16, microbatches: int = 2, seed: int = 0) -> None:
        self.sequences, self.microbatches, self.seed = sequences, microbatches, seed
        self.rewards: list[float] = []  # of the steps that this process has given
        self.mean = 0.0
        self.step = 0
        self.model: nn.Module | None = None

    def setup(self, module: nn.Module, task: Task, world: World) -> None:
        self.model, self.rank = module, world.rank

    def start(self, step: int, row: int) -> None:
        self.step = step

    def next_step(self) -> list[Batch]:
        draws = generator("cpu", self.seed, "rollout", self.step, self.rank)
        batches = [self._sample(draws) for _ in range(self.microbatches)]
        reward = float(torch.stack([batch["reward"].mean() for batch in batches]).mean())
        self.rewards.append(reward)
        self.mean = 0.8 * self.mean + 0.2 * reward
        self.step += 1
        return batches

    @torch.no_grad()
    def _sample(self, draws: torch.Generator) -> Batch:
        assert self.model is not None
        tokens = torch.zeros(self.sequences, 1, dtype=torch.long)
        for _ in range(LENGTH):
            chances = self.model(tokens[:, -1]).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=draws)], dim=1)
        reward = (tokens[:, 1:] == WANTED).float().mean(1)
        ids = tuple(f"rollout-{self.step}-{number}" for number in range(self.sequences))
        return Batch(
            {"tokens": tokens, "reward": reward, "advantage": reward - self.mean},
            sample_ids=ids,
            counts={"samples": self.sequences},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = float(state.get("mean", 0.0))


class PolicyGradient(Task):
    """Raise the likelihood of sequences by their advantage."""

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"samples": len(batch["reward"])}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["tokens"][:, :-1])

    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        chosen = outputs.log_softmax(-1).gather(-1, batch["tokens"][:, 1:, None]).squeeze(-1).sum(1)
        return Losses([LossTerm("policy", -(batch["advantage"] * chosen).sum(), "samples")])
