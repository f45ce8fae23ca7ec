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
    prefix_hits: int  # tokens of prompts whose blocks were reused
    encoder_hits: int  # images, frames or recordings whose embeddings were reused
    preemptions: int
    generated: int  # tokens
    prefilled: int  # tokens of prompts that were computed
    steps: int
