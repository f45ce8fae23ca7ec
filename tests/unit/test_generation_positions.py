"""Where text and latents of a sample lie, in each of the ways in which families count."""

from __future__ import annotations

import pytest

from tessera.diffusion.forms import GenerationForm, Grid, PositionStyle, TextForm, sample_positions
from tessera.errors import TesseraError


def positions(style: PositionStyle, text: int, *grids: Grid, table: int = 0) -> list[list[int]]:
    form = GenerationForm(4, (1, 2, 2), positions=style, table=table)
    return sample_positions(form, text, grids).T.tolist()


def test_a_grid_counts_from_zero_and_references_lie_in_later_frames() -> None:
    video = [[f, 0, c] for f in range(2) for c in range(3)]
    assert positions("grid", 2, (2, 1, 3), (1, 1, 1)) == [[0, 0, 0], [0, 0, 0], *video, [2, 0, 0]]


def test_a_centered_grid_has_text_behind_the_largest_image() -> None:
    image = [[0, r, c] for r in (-2, -1, 0) for c in (-1, 0)]
    reference = [[1, -1, c] for c in (-4, -3, -2, -1, 0, 1, 2, 3)]
    assert positions("centered", 2, (1, 3, 2), (1, 1, 8)) == [[4, 4, 4], [5, 5, 5], *image, *reference]


def test_layers_are_frames_and_the_image_they_make_is_the_frame_before() -> None:
    found = positions("layered", 1, (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    assert found == [[3, 3, 3], *([frame, -1, -1] for frame in (0, 1, 2, -1))]


def test_a_table_is_read_in_its_middle_and_has_an_end() -> None:
    assert positions("table", 1, (1, 1, 2), table=5) == [[0, 0, 0], [0, 2, 1], [0, 2, 2]]
    with pytest.raises(TesseraError, match="positions for 5 x 5"):
        positions("table", 1, (1, 6, 2), table=5)


def test_a_caption_stands_in_its_template_once_whatever_it_holds() -> None:
    form = TextForm(template="Make: {} Now.")
    assert form.prompt("a {} of  {0}") == "Make: a {} of  {0} Now."
    assert TextForm(tidy=True).prompt(" red &amp;amp;\n  blue ") == "red & blue"
