"""List every generation family that is compared with diffusers. A new one adds a module and one line."""

from __future__ import annotations

from generation import GenerationFamily
from wan_generation import Wan

GENERATION: dict[str, GenerationFamily] = {family.spec.name: family for family in (Wan(),)}
CASES = [(name, config) for name, family in GENERATION.items() for config in family.configs]
