"""Define the outputs of models, by name.

A model family declares the outputs of its model (`ModelSpec.outputs`), a task those it reads (`Task.reads`). Outputs of
heads are always returned. Hidden states of layers cost memory: a model returns them only if the batch asks for them
(`Batch.outputs`). A name is a dotted path, so that a declaration can be a pattern (see `config.pattern`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from tessera.errors import TesseraError

LOGITS = "logits"  # logits of the next token, from the main head
REWARDS = "rewards"  # one number for each token: the reward of the sequence up to it
LATENTS = "latents"  # the raw prediction of a generation model (a velocity, the noise or v), [N, channels x patch]
HIDDEN = "hidden"  # the final hidden states; for those after a layer see `hidden_of`
# Outputs of families that use `nn.causal_lm` or `nn.multimodal`.
LANGUAGE_OUTPUTS = (LOGITS, HIDDEN, f"{HIDDEN}.text.layers.{{*}}")


class Projection(NamedTuple):
    """Hold a head module and the hidden states that are its input.

    A loss multiplies by the head's weight in chunks, so that the logits of a long row never exist at once.
    """

    hidden: Tensor  # [T, D]
    head: Any  # nn.Module with .weight [V, D]; `tree_map_only` over tensors returns it unchanged


class AuxiliaryLoss(NamedTuple):
    """Hold a loss that a model computes itself: a sum over the trained labels, and its weight in the loss."""

    sum: Tensor
    weight: float


# Only dictionaries and tuples: FSDP adds its backward hooks to tensors that it finds in these.
Outputs = dict[str, Tensor | Projection | AuxiliaryLoss]


def hidden_of(path: str) -> str:
    """Return the output name of the hidden states after the layer at a module path, such as `text.layers.3`."""
    return f"{HIDDEN}.{path}"


def projection(outputs: Mapping[str, Any], name: str) -> Projection:
    """Return the output `name` as a `Projection`: hidden states and the head that is not applied yet."""
    output = _output(outputs, name)
    if not isinstance(output, Projection):
        raise TesseraError(
            f"the model's output {name!r} is a {type(output).__name__}, and the task needs hidden states with a head",
            where="train.task",
            fix="return a Projection(hidden, head) under this name",
            code="task.output-kind",
        )
    return output


def tensor(outputs: Mapping[str, Any], name: str) -> Tensor:
    """Return the output `name`, which must be a tensor."""
    output = _output(outputs, name)
    assert isinstance(output, Tensor), f"the output {name!r} is a {type(output).__name__}, not a tensor"
    return output


def _output(outputs: Mapping[str, Any], name: str) -> Any:
    if not isinstance(outputs, Mapping) or name not in outputs:
        names = list(outputs) if isinstance(outputs, Mapping) else [type(outputs).__name__]
        raise TesseraError(
            f"the model returned no output {name!r}",
            where="train.task",
            allowed=names,
            fix="a model returns its outputs by name: {name: tensor or Projection(hidden, head)}",
            code="task.missing-output",
        )
    return outputs[name]
