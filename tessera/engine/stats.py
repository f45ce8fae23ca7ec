"""Define the counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Count what an engine has done, and what it does now."""

    running: int
    waiting: int
    blocks_used: int
    blocks: int
    prefix_hits: int  # number of tokens whose blocks were reused, also after a preemption
    encoder_hits: int  # number of images, frames or recordings whose embeddings were reused
    preemptions: int
    generated: int  # number of sampled tokens
    prefilled: int  # number of prompt tokens that were computed
    steps: int
