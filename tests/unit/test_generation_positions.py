"""Where text and latents of a sample lie, in each of the ways in which families count."""

from __future__ import annotations

from typing import Any

from tessera.diffusion.captions import Captions
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.given_images import Grid
from tessera.diffusion.qwen_image.config import QwenImageFamily
from tessera.diffusion.sd3.config import SD3Family
from tests.errors import raises

SHAPE: dict[str, Any] = {"channels": 4, "patch": (1, 2, 2)}


def positions(family: GenerationFamily, text: int, *grids: Grid) -> list[list[int]]:
    return family.positions(text, grids).T.tolist()


def test_a_grid_counts_from_zero_and_references_lie_in_later_frames() -> None:
    video = [[f, 0, c] for f in range(2) for c in range(3)]
    assert positions(GenerationFamily(**SHAPE), 2, (2, 1, 3), (1, 1, 1)) == [[0, 0, 0], [0, 0, 0], *video, [2, 0, 0]]


def test_a_centered_grid_has_text_behind_the_largest_image() -> None:
    image = [[0, r, c] for r in (-2, -1, 0) for c in (-1, 0)]
    reference = [[1, -1, c] for c in (-4, -3, -2, -1, 0, 1, 2, 3)]
    assert positions(QwenImageFamily(**SHAPE), 2, (1, 3, 2), (1, 1, 8)) == [[4, 4, 4], [5, 5, 5], *image, *reference]


def test_a_table_is_read_in_its_middle_and_has_an_end() -> None:
    assert positions(SD3Family(**SHAPE, table=5), 1, (1, 1, 2)) == [[0, 0, 0], [0, 2, 1], [0, 2, 2]]
    with raises("generation.size-has-no-positions"):
        positions(SD3Family(**SHAPE, table=5), 1, (1, 6, 2))


def test_a_caption_stands_in_its_template_once_whatever_it_holds() -> None:
    captions = Captions(template="Make: {} Now.")
    assert captions.prompt("a {} of  {0}") == "Make: a {} of  {0} Now."
    assert Captions(tidy=True).prompt(" red &amp;amp;\n  blue ") == "red & blue"
