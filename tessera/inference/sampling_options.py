"""The sampling options that a user names: refuse those without effect."""

from __future__ import annotations

from tessera.engine.request import Sampling
from tessera.errors import TesseraError


def sampling_of(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Sampling:
    """Return the sampling for these options. Raise for wrong values, and for limits that greedy decoding ignores."""
    sampling = Sampling(temperature, top_k, top_p, seed=seed)
    unused = [name for name, used in (("top_k", top_k > 0), ("top_p", top_p < 1)) if used]
    if temperature == 0 and unused:
        raise TesseraError(
            f"{' and '.join(unused)} has no effect at temperature 0, which takes the likeliest token",
            where="sampling",
            fix=f"set a temperature above 0, or leave {' and '.join(unused)} out",
            code="generation.option-without-effect",
        )
    return sampling
