"""What Qwen2-VL says where things do not fit; `test_vision_language_numerics.py` compares the whole."""

from __future__ import annotations

from qwen2_vl_cases import Qwen2VL

from tests.errors import raises

FAMILY = Qwen2VL()


def test_pictures_that_do_not_fit_their_places_are_an_error_with_both_counts() -> None:
    pair = FAMILY.pair(0, 5)
    batch = FAMILY.pack(pair.config, [FAMILY.case(pair, [("image", (1, 4, 4))], 1)])
    with raises("data.stream-slots-mismatch"):
        pair.model(batch.with_tensors(media_slots=batch["media_slots"][:3]))
