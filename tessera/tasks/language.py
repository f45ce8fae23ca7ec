"""Train to predict the next token, of text alone or with media. The loss covers tokens that have a label."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera.config.reader import Section, build
from tessera.config.run_config import RunConfig
from tessera.core.batch import EMBEDDING_NOISE, IGNORE, Batch
from tessera.core.outputs import LOGITS, AuxiliaryLoss, Outputs, projection
from tessera.core.task import Counts, Losses, LossTerm, Task
from tessera.errors import TesseraError
from tessera.nn.layers import TokenEmbedding
from tessera.ops.loss import linear_cross_entropy
from tessera.ops.registry import AUTO
from tessera.ops.rows import take_rows
from tessera.runtime import device as devices
from tessera.runtime.rng import generator

LABELS = "labels"  # key of the number of labelled tokens that the loss is averaged over
LANGUAGE_LOSS = "language_loss"


class LanguageOptions(Section):
    """Declare `train.task_options` of `LanguageTask`."""

    neftune_alpha: float | None = Field(
        None, gt=0, le=1e4, description="noise on the embeddings of training samples (NEFTune); 5 to 15 are usual"
    )


class LanguageTask(Task):
    """Sum the cross-entropy of the tokens that have a label, and the router loss of experts."""

    reads: tuple[str, ...] = (LOGITS,)

    def __init__(self, neftune_alpha: float | None = None) -> None:
        self.options = build(LanguageOptions, {"neftune_alpha": neftune_alpha}, "train.task_options")
        self._implementation = AUTO
        self._width = 0  # width of token embeddings

    def check(self, config: RunConfig, module: nn.Module) -> None:
        if self.options.neftune_alpha is None:
            return
        embedding = next((part for part in module.modules() if isinstance(part, TokenEmbedding)), None)
        if embedding is None:
            raise TesseraError(
                f"{type(module).__name__} does not support noise on its embeddings (NEFTune)",
                where="train.task_options.neftune_alpha",
                fix="use a family of Tessera's own, such as qwen3 or qwen2_5_vl",
                code="task.no-embedding-noise",
            )
        self._width = embedding.embedding_dim

    def inputs(self, batch: Batch) -> Batch:
        alpha = self.options.neftune_alpha
        if alpha is None:
            return batch
        return batch.with_tensors(**{EMBEDDING_NOISE: embedding_noise(batch, alpha, self._width)})

    def compile(self) -> None:
        self._implementation = "compiled"

    def counts(self, batch: Batch) -> Counts:
        return {LABELS: label_count(batch)}

    def losses(self, outputs: Outputs, batch: Batch) -> Losses:
        total = self.cross_entropy(outputs, LOGITS, batch["labels"], batch.get("trained"))
        terms = [LossTerm(LANGUAGE_LOSS, total, LABELS)]
        for name, output in outputs.items():
            if isinstance(output, AuxiliaryLoss):
                terms.append(LossTerm(name, output.sum, LABELS, output.weight))
        return Losses(terms)

    def cross_entropy(self, outputs: Outputs, name: str, labels: Tensor, trained: Tensor | None) -> Tensor:
        """Return the summed cross-entropy of an output. `trained`: positions with a label."""
        hidden, head = projection(outputs, name)
        weight = head.weight
        # Compute logits of trained positions only: logits are expensive.
        if trained is not None:
            hidden, labels = take_rows(hidden, trained), labels.index_select(0, trained)
        # `precision.output` may have cast the hidden states to fp32. The product is computed in the head's dtype.
        total, _ = linear_cross_entropy(hidden.to(weight.dtype), weight, labels, implementation=self._implementation)
        return total


def embedding_noise(batch: Batch, alpha: float, width: int) -> Tensor:
    """Return the noise of NEFTune for the embeddings of the tokens that this rank has: [T, width].

    It is uniform within alpha / sqrt(length x width), with the length of each sample, not of its packed row. Row seeds
    determine the noise: ranks that share a row draw the noise of the full row, and each takes its part.
    """
    tokens, lengths = batch["tokens"], batch.segments["text"].lengths
    rows = max(1, len(batch.seeds))
    drawn = [
        torch.rand(
            sum(lengths) // rows, width, device=tokens.device, generator=generator(tokens.device, seed, "neftune")
        )
        for seed in batch.seeds
    ]
    noise = torch.cat(drawn).mul_(2).sub_(1)
    sizes = devices.send([alpha / (length * width) ** 0.5 for length in lengths], torch.float32, tokens.device)
    counts = devices.send(lengths, torch.int64, tokens.device)
    noise *= sizes.repeat_interleave(counts, output_size=noise.shape[0]).unsqueeze(1)
    index = batch.get("token_index")
    return noise if index is None else noise.index_select(0, index)


def label_count(batch: Batch) -> int | Tensor:
    """Return the number of labelled tokens of a micro-batch."""
    return batch["trained"].shape[0] if "trained" in batch else (batch["labels"] != IGNORE).sum()


TASK = LanguageTask
