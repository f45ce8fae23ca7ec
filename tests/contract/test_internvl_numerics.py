"""What InternVL says where pictures and places do not fit; `test_vision_language_numerics.py` compares the whole."""

from __future__ import annotations

from internvl_cases import InternVL

from tests.errors import raises


def test_tiles_that_do_not_fit_their_places_are_an_error_with_both_counts() -> None:
    family = InternVL()
    pair = family.pair(0, 5)
    batch = family.pack(pair.config, [family.case(pair, [1], 1)])
    with raises("data.stream-slots-mismatch"):
        pair.model(batch.with_tensors(media_slots=batch["media_slots"][:3]))
