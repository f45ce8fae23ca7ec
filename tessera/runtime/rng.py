"""Derive seeds from words that name their purpose, so that random numbers do not depend on earlier draws."""

from __future__ import annotations

import hashlib

import torch

_MASK = (1 << 63) - 1


def derive(*words: object) -> int:
    """Return a stable 63-bit seed from a run seed and its purpose: derive(seed, "init", "text.norm.weight")."""
    digest = hashlib.blake2b("\x1f".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


def generator(device: torch.device | str, *words: object) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(derive(*words))


def seed_process(*words: object) -> None:
    """Seed torch's global generator, which dropout uses. This is called in every step, so its state is not saved."""
    torch.manual_seed(derive(*words))
