"""Guide a prediction by a prompt: away from what the model predicts without it, or with a negative one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """Describe how a family combines the predictions with and without the prompt."""

    # Scale the result, token by token, to the length of the prediction with the prompt (Qwen-Image).
    keep_norm: bool = False
    # Grow the scale from 1 as the noise gets less, by the cosine law of CogVideoX.
    dynamic: bool = False

    def scale_at(self, scale: float, timestep: float, steps: int) -> float:
        """Return the scale at a time of 1000 (noise) to 0 (data)."""
        if not self.dynamic:
            return scale
        return 1 + scale * (1 - math.cos(math.pi * ((steps - timestep) / steps) ** 5.0)) / 2

    def combine(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
        """Return the guided prediction of tokens [N, P]."""
        guided = without + scale * (with_prompt - without)
        if self.keep_norm:
            guided = guided * (with_prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        return guided
