"""A drawing shows what the matrix holds, and says what it leaves out."""

import subprocess
import sys

import pytest
import torch
from PIL import Image
from rich.console import Console

from heedful.cli import picture


def plain(matrix, **options):
    return picture.to_text(matrix, colour=False, **options).plain.splitlines()


def pixels(text):
    """The colours of a drawing in half blocks, two rows a line; None where nothing is drawn."""
    rows = []
    for line in text.split("\n"):
        cells = []
        for segment in line.render(Console()):
            for character in segment.text.strip("\n"):
                ink, ground = segment.style and segment.style.color, segment.style and segment.style.bgcolor
                ink, ground = ink and ink.name, ground and ground.name
                cells.append({" ": (None, None), "█": (ink, ink), "▀": (ink, ground), "▄": (None, ink)}[character])
        rows += [[top for top, _ in cells], [bottom for _, bottom in cells]]
    return rows


def corner(path, i, j, n, m):
    """The colour in the middle of one cell of a PNG."""
    cell = picture.cell_size(n, m)
    with Image.open(path) as image:
        return image.getpixel((picture.LEFT + j * cell + cell // 2, picture.TOP + i * cell + cell // 2))


def test_the_identity_is_a_diagonal_in_shades():
    lines = plain(torch.eye(8), caption=False)
    assert lines == ["██", "  ██", "    ██", "      ██"]


def test_the_identity_is_a_diagonal_in_half_blocks():
    rows = pixels(picture.to_text(torch.eye(7), caption=False))
    for i, row in enumerate(rows[:7]):
        assert [colour is not None for colour in row] == [j == i for j in range(7)]


def test_exact_zeros_are_blank_and_small_weights_are_not():
    lines = plain(torch.tensor([[1.0, 1e-9, 0.0, 1.0]]), caption=False)
    assert lines == ["█░ █"]


def test_larger_weights_look_stronger():
    row = torch.tensor([[0.02, 0.2, 0.5, 1.0]])
    assert plain(row, caption=False) == ["░▒▓█"]
    assert len(set(pixels(picture.to_text(row, caption=False))[0])) == 4


def test_signed_weights_diverge_around_zero():
    matrix = torch.tensor([[1.0, -1.0, 0.0, 0.25, -0.25]])
    drawing, legend = plain(matrix)[:2]
    assert drawing == "█# ▓="
    assert legend == "-1 #=-. 0 ░▒▓█ 1"
    above, below, none, *_ = pixels(picture.to_text(matrix, caption=False))[0]
    assert none is None and above != below


def test_the_caption_states_the_scale():
    assert "0 ░▒ 0.1 ▓█ 0.42" in plain(torch.tensor([[0.42, 0.1], [0.0, 0.3]]))
    assert "0 … 0" in plain(torch.zeros(2, 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_marked_and_counted(bad):
    matrix = torch.ones(2, 6)
    matrix[0, 2] = bad
    lines = plain(matrix)
    assert lines[0] == "██?███"
    assert "1 NaN or infinite (?)" in " ".join(lines)
    marked = pixels(picture.to_text(matrix, caption=False))[0]
    assert marked[2] == "#" + picture.NOT_FINITE and marked[1] != marked[2]


def test_a_matrix_of_nothing_but_nan_is_drawn():
    assert plain(torch.full((2, 2), torch.nan))[0] == "??"


def test_a_large_matrix_shrinks_to_the_width_and_says_so():
    for colour, block in ((True, "4 × 4"), (False, "8 × 4")):
        text = picture.to_text(torch.eye(100), width=30, colour=colour)
        assert max(len(line) for line in text.plain.splitlines()) <= 30
        assert f"largest of {block} entries" in " ".join(text.plain.split())
    assert "mean of 4 × 4 entries" in " ".join(picture.to_text(torch.eye(100), 30, pool="mean").plain.split())


def test_nothing_is_said_of_sharing_where_each_entry_has_its_cell():
    assert "entries" not in picture.to_text(torch.eye(30), width=30).plain


def test_shrinking_keeps_the_largest_with_its_sign_or_takes_the_mean():
    matrix = torch.tensor([[1.0, -3.0, 2.0], [0.0, 2.0, 0.0], [5.0, 4.0, torch.nan]])
    largest = picture.shrink(matrix, (2, 2))
    assert largest[:, 0].tolist() == [-3.0, 5.0] and largest[0, 1] == 2 and largest[1, 1].isnan()
    assert picture.shrink(matrix, (2, 2), "mean")[0].tolist() == [0.0, 1.0]


def test_an_empty_matrix_says_so_and_a_batch_is_refused(tmp_path):
    assert picture.to_text(torch.zeros(0, 5)).plain == "(empty: 0 × 5)"
    with pytest.raises(ValueError, match="expected at least one entry"):
        picture.to_png(torch.zeros(0, 5), tmp_path / "none.png")
    with pytest.raises(ValueError, match=r"expected two axes .* head axes"):
        picture.to_text(torch.zeros(2, 3, 4))


def test_a_png_has_the_expected_size_and_one_colour_for_each_weight(tmp_path):
    matrix = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.4, 0.0], [0.1, 0.2, 0.7]])
    path = tmp_path / "weights.png"
    picture.to_png(matrix, path, "three tokens", "by hand")
    side = 3 * picture.cell_size(3, 3)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (picture.LEFT + side + picture.RIGHT, picture.TOP + side + picture.BOTTOM)
        assert image.getpixel((2, 2)) == (255, 255, 255)
    colours = {float(matrix[i, j]): corner(path, i, j, 3, 3) for i in range(3) for j in range(3)}
    assert len(set(colours.values())) == len(colours) == 7
    ink = {weight: sum(colour) for weight, colour in colours.items()}
    assert ink[1] < ink[0.6000000238418579] < ink[0.10000000149011612] < ink[0]


def test_a_png_of_signed_weights_is_blue_below_zero_and_orange_above(tmp_path):
    path = tmp_path / "signed.png"
    picture.to_png(torch.tensor([[0.5, -0.5], [0.0, torch.nan]]), path)
    red, _, blue = corner(path, 0, 0, 2, 2)
    assert red > blue
    red, _, blue = corner(path, 0, 1, 2, 2)
    assert blue > red
    assert "#{:02x}{:02x}{:02x}".format(*corner(path, 1, 0, 2, 2)) == picture.BLANK
    with Image.open(path) as image:  # beside the cross
        cell = picture.cell_size(2, 2)
        found = image.getpixel((picture.LEFT + cell + cell // 2, picture.TOP + cell + 20))
    assert "{:02x}{:02x}{:02x}".format(*found) == picture.NOT_FINITE


@pytest.mark.parametrize("shape", [(1, 1), (2000, 3), (1, 1000), (1200, 1200)])
def test_any_shape_becomes_a_png_of_bounded_size(tmp_path, shape):
    path = tmp_path / "any.png"
    picture.to_png(torch.rand(shape), path, "a title that is too long for its picture " * 4)
    with Image.open(path) as image:
        assert image.width <= picture.LEFT + picture.SIDE + picture.RIGHT
        assert image.height <= picture.TOP + picture.SIDE + picture.BOTTOM


def test_drawing_imports_neither_rich_nor_pillow_until_it_draws():
    code = "import sys, heedful.cli.picture; print([name for name in ('rich', 'PIL') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
