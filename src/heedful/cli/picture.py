"""A matrix as a picture, in the terminal or in a PNG file.

    weights ≥ 0   viridis from 0 to the largest weight
    signed        blue below 0 and orange above it, equally strong for equal sizes
    exactly 0     left blank, so that a pattern shows
    not finite    red, and counted in the caption

The strength of a colour is √(weight / largest weight). Rows of attention sum to one: without the square root, the first
row of a causal matrix, which sees one key, would make all others invisible. Every picture shows its scale, and says if
several entries share one cell.

Functions import rich and Pillow themselves, so this module needs only torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

import torch

from heedful.shapes import Float, Int, Tensor

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont
    from rich.text import Text

Pool = Literal["max", "mean"]
"""The value of a cell with several entries: the entry of largest magnitude, with its sign, or the mean."""

# viridis (van der Walt and Smith 2015) at sixteen equal steps.
VIRIDIS = (
    "440154 481a6c 472f7d 414487 39568c 31688e 2a788e 23888e 1f988b 22a884 35b779 54c568 7ad151 a5db36 d2e21b fde725"
)
Theme = dict[str, str]
"""Colour ramps, from zero to the largest weight."""
# A terminal may be dark or light: these colours avoid black, and use white only for large weights.
TERMINAL = {"weights": VIRIDIS[14:], "below": "4d5d75 3b82d0 52b4ff", "above": "75604a c97a26 ffab40"}
# Paper is light: larger weights are darker.
PAPER = {
    "weights": " ".join(reversed(VIRIDIS.split())),
    "below": "d9e9f5 9ec8e6 3f8fc5 0b5394 052a52",
    "above": "fde7d3 fcc38a f08532 b64a05 622503",
}
NOT_FINITE = "d7191c"

SHADES = "░▒▓█"
SHADES_BELOW = ".-=#"
NOT_FINITE_MARK = "?"


@dataclass(frozen=True)
class Scale:
    """Maps numbers to colour strengths; `top` is the largest magnitude."""

    top: float
    signed: bool

    @classmethod
    def of(cls, matrix: Float[Tensor, "n m"]) -> Scale:
        finite = matrix[matrix.isfinite()]
        return cls(float(finite.abs().max()) if finite.numel() else 0.0, bool((finite < 0).any()))

    def strength(self, values: Tensor) -> Tensor:
        """Strengths from 0 to 1, regardless of sign."""
        return (values.abs() / self.top).clamp(0, 1).sqrt() if self.top else torch.zeros_like(values)

    def value(self, strength: float) -> float:
        """The magnitude with this strength."""
        return self.top * strength**2


def to_text(
    matrix: Float[Tensor, "n m"], width: int = 64, *, colour: bool = True, pool: Pool = "max", caption: bool = True
) -> Text:
    """The matrix as text of at most `width` columns: half blocks (two rows per line), or shades without colour.

    >>> print(to_text(torch.eye(6), colour=False, caption=False))
    ██
      ██
        ██
    """
    from rich.text import Text

    values = _checked(matrix)
    if not values.numel():
        return Text(f"(empty: {values.shape[0]} × {values.shape[1]})")
    block = block_size(values.shape, width, colour=colour)
    values = shrink(values, block, pool)
    scale = Scale.of(values)
    lines = _half_blocks(values, scale) if colour else _shades(values, scale)
    if caption:
        lines += _caption(_checked(matrix), scale, block, pool, width, colour)
    return Text("\n").join(lines)


def block_size(shape: tuple[int, ...], width: int, *, colour: bool = True) -> tuple[int, int]:
    """Rows and columns that share one cell; a line of shades merges two rows, a line of half blocks shows both."""
    step = max(1, -(-max(shape) // max(width, 1)))
    return (step, step) if colour else (2 * step, step)


def shrink(matrix: Float[Tensor, "n m"], block: tuple[int, int], pool: Pool = "max") -> Float[Tensor, "rows cols"]:
    """One entry for each block of rows × columns; blocks at the edge may be smaller. NaN stays NaN.

    >>> shrink(torch.tensor([[1., -3.], [0., 2.], [5., 4.]]), (2, 2))
    tensor([[-3.],
            [ 5.]])
    """
    rows, cols = block
    matrix = torch.stack([_pooled(part, pool) for part in matrix.split(rows)])
    return torch.stack([_pooled(part, pool) for part in matrix.mT.split(cols)], -1)


def _pooled(part: Float[Tensor, "block m"], pool: Pool) -> Tensor:
    if pool == "mean":
        return part.mean(0)
    return part.gather(0, part.abs().argmax(0, keepdim=True))[0]


def _checked(matrix: Tensor) -> Float[Tensor, "n m"]:
    values = torch.as_tensor(matrix).detach()
    if values.ndim != 2:
        raise ValueError(
            f"matrix: shape {tuple(values.shape)}, expected two axes (queries, keys). Likely cause: batch or head "
            "axes; pick one matrix, such as A[0, 0]."
        )
    return values.to("cpu", torch.float64)


def _ramp(anchors: str, steps: int = 256) -> Int[Tensor, "steps 3"]:
    """Colours interpolated between equally spaced anchors."""
    table = torch.tensor([list(bytes.fromhex(anchor)) for anchor in anchors.split()], dtype=torch.float64)
    place = torch.linspace(0, len(table) - 1, steps, dtype=torch.float64)
    low = place.long().clamp(max=len(table) - 2)
    return torch.lerp(table[low], table[low + 1], (place - low)[:, None]).round().long()


def _rgb(colour: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(colour)))


def _paint(values: Tensor, scale: Scale, theme: Theme) -> Int[Tensor, "*s 3"]:
    """The colour of each entry. Zeros get a colour too; the caller leaves them blank."""
    step = (scale.strength(values.nan_to_num(0, 0, 0)) * 255).round().long()
    if scale.signed:
        painted = torch.where((values < 0)[..., None], _ramp(theme["below"])[step], _ramp(theme["above"])[step])
    else:
        painted = _ramp(theme["weights"])[step]
    return torch.where(values.isfinite()[..., None], painted, _rgb(NOT_FINITE))


def _hex(colour: Tensor) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour.tolist())


def _half_blocks(values: Float[Tensor, "n m"], scale: Scale) -> list[Text]:
    from rich.text import Text

    painted = _paint(values, scale, TERMINAL)
    cells = [
        ["" if value == 0 else _hex(colour) for value, colour in zip(row, colours, strict=True)]
        for row, colours in zip(values.tolist(), painted, strict=True)
    ]
    if len(cells) % 2:
        cells.append([""] * len(cells[0]))
    lines = []
    for upper, lower in zip(cells[::2], cells[1::2], strict=True):
        line = Text(no_wrap=True)
        for top, bottom in zip(upper, lower, strict=True):
            line.append(*_two_cells(top, bottom))
        lines.append(line)
    return lines


def _two_cells(top: str, bottom: str) -> tuple[str, str]:
    """A character and its style: the upper half is the ink of ▀, the lower half its background."""
    if top == bottom:
        return ("█", top) if top else (" ", "")
    if not bottom:
        return "▀", top
    if not top:
        return "▄", bottom
    return "▀", f"{top} on {bottom}"


def _shades(values: Float[Tensor, "n m"], scale: Scale) -> list[Text]:
    from rich.text import Text

    strengths = scale.strength(values).tolist()
    rows = zip(values.tolist(), strengths, strict=True)
    return [Text("".join(map(_shade, row, strong)).rstrip(), no_wrap=True) for row, strong in rows]


def _shade(value: float, strength: float) -> str:
    if value == 0:
        return " "
    if not isfinite(value):
        return NOT_FINITE_MARK
    shades = SHADES_BELOW if value < 0 else SHADES
    return shades[min(int(strength * len(shades)), len(shades) - 1)]


def _caption(matrix: Tensor, scale: Scale, block: tuple[int, int], pool: Pool, width: int, colour: bool) -> list[Text]:
    """The scale with its numbers, then notes: blank entries, shared cells, entries that are not finite."""
    from rich.text import Text

    notes = []
    if bool((matrix == 0).any()):
        notes.append("blank: exactly 0")
    notes += shared_cells(block, pool, "cell" if colour else "character")
    notes += not_finite(matrix, "red" if colour else NOT_FINITE_MARK)
    text = [Text(line, style="dim", no_wrap=True) for line in wrap("; ".join(notes), max(width, 24))]
    return [legend(scale, colour), *text]


def shared_cells(block: tuple[int, int], pool: Pool, cell: str = "cell") -> list[str]:
    """A sentence on what one cell of a shrunken matrix is; empty if each cell is one entry."""
    if block == (1, 1):
        return []
    what = {"max": "largest", "mean": "mean"}[pool]
    return [f"a {cell} is the {what} of {block[0]} × {block[1]} entries"]


def not_finite(matrix: Tensor, mark: str) -> list[str]:
    """A sentence with the number of entries that are not finite; empty if there are none."""
    bad = int((~matrix.isfinite()).sum())
    return [f"{bad} NaN or infinite ({mark})"] if bad else []


def legend(scale: Scale, colour: bool = True) -> Text:
    """0 ░▒ 0.1 ▓█ 0.4: the numbers at the ends and in the middle of the ramp."""
    from rich.text import Text

    if not scale.top:
        return Text("0 … 0")
    top, middle = f"{scale.top:.2g}", f"{scale.value(0.5):.2g}"
    parts: list[str | tuple[str, str]] = []
    if scale.signed:
        parts += [f"-{top} ", *_swatches(scale, -1, colour), " 0 ", *_swatches(scale, 1, colour), f" {top}"]
    else:
        ramp = _swatches(scale, 1, colour)
        half = len(ramp) // 2
        parts += ["0 ", *ramp[:half], f" {middle} ", *ramp[half:], f" {top}"]
    return Text.assemble(*parts, no_wrap=True)


def _swatches(scale: Scale, sign: int, colour: bool) -> list[str | tuple[str, str]]:
    """The ramp of one sign: from 0 to the right for positive, from 0 to the left for negative weights."""
    if not colour:
        return list(SHADES) if sign > 0 else list(SHADES_BELOW[::-1])
    strengths = torch.linspace(0.05, 1, 8, dtype=torch.float64)
    painted = _paint(sign * scale.top * strengths.square(), scale, TERMINAL)
    ramp: list[str | tuple[str, str]] = [("█", _hex(one)) for one in painted]
    return ramp if sign > 0 else ramp[::-1]


# The PNG: margins around the matrix, in pixels, and the length of its longer side.
LEFT, TOP, RIGHT, BOTTOM, SIDE = 130, 150, 220, 120, 896
INK, FAINT, BLANK = "#1f2328", "#6a737d", "#f3f4f6"


def cell_size(n: int, m: int) -> int:
    """Side of one cell in pixels; 0 if the matrix has more entries than the picture has pixels."""
    return SIDE // max(n, m)


def to_png(
    matrix: Float[Tensor, "n m"],
    path: str | Path,
    title: str = "",
    subtitle: str = "",
    *,
    pool: Pool = "max",
    query: str = "query",
    key: str = "key",
) -> None:
    """The matrix as a picture on a light background, with axes, a colour bar and its scale.

    >>> to_png(torch.eye(4), "eye.png", "the identity")  # doctest: +SKIP
    """
    from PIL import Image, ImageDraw

    values = _checked(matrix)
    if not values.numel():
        raise ValueError(f"matrix: shape {tuple(values.shape)}, expected at least one entry to draw.")
    (n, m), step = values.shape, -(-max(values.shape) // SIDE)
    shown = shrink(values, (step, step), pool)
    scale, cell = Scale.of(shown), cell_size(*shown.shape)
    height, width = (size * cell for size in shown.shape)
    notes = [subtitle] if subtitle else []
    notes += shared_cells((step, step), pool) + not_finite(values, "red")
    sheet = Image.new("RGB", (LEFT + width + RIGHT, TOP + max(height, 240) + BOTTOM), "white")
    pen = ImageDraw.Draw(sheet)

    painted = torch.where((shown == 0)[..., None], _rgb(BLANK[1:]), _paint(shown, scale, PAPER))
    picture = Image.frombytes("RGB", (shown.shape[1], shown.shape[0]), bytes(painted.flatten().tolist()))
    sheet.paste(picture.resize((width, height), Image.Resampling.NEAREST), (LEFT, TOP))
    if cell >= 8:  # a shape as well as a colour
        for i, j in (~shown.isfinite()).nonzero().tolist():
            x, y = LEFT + j * cell, TOP + i * cell
            pen.line((x + 2, y + 2, x + cell - 3, y + cell - 3), "white", 2)
            pen.line((x + 2, y + cell - 3, x + cell - 3, y + 2), "white", 2)
    pen.rectangle((LEFT - 1, TOP - 1, LEFT + width, TOP + height), outline=FAINT)

    for y, text, colour, size in ((64, title, INK, 38), (112, "; ".join(notes), FAINT, 22)):
        pen.text((LEFT, y), text, colour, _fitting(text, size, sheet.width - LEFT - 24), anchor="lm")
    for place in _ticks(m):
        x = LEFT + (place + 0.5) * width / m
        pen.line((x, TOP + height, x, TOP + height + 8), FAINT, 2)
        pen.text((x, TOP + height + 14), str(place), FAINT, _font(22), anchor="ma")
    for place in _ticks(n):
        y = TOP + (place + 0.5) * height / n
        pen.line((LEFT - 9, y, LEFT - 1, y), FAINT, 2)
        pen.text((LEFT - 16, y), str(place), FAINT, _font(22), anchor="rm")
    pen.text((LEFT + width / 2, TOP + height + 52), key, INK, _font(26), anchor="ma")
    side = Image.new("RGB", (max(90, int(_font(26).getlength(query)) + 4), 40), "white")
    ImageDraw.Draw(side).text((side.width // 2, 20), query, INK, _font(26), anchor="mm")
    sheet.paste(side.rotate(90, expand=True), (14, TOP + (height - side.width) // 2))
    _colour_bar(sheet, pen, shown, scale, LEFT + width + 50, max(height, 240))
    sheet.save(path, format="PNG")


def _colour_bar(sheet, pen, shown: Tensor, scale: Scale, x: int, height: int) -> None:
    """The colour bar, from the largest weight down to 0 or to its negative, with numbers beside their colours."""
    from PIL import Image

    length = height - 56
    if scale.top:
        place = torch.linspace(1, -1 if scale.signed else 0, length, dtype=torch.float64)
        painted = _paint(place.sign() * place.square() * scale.top, scale, PAPER)
        bar = Image.frombytes("RGB", (1, length), bytes(painted.flatten().tolist()))
        sheet.paste(bar.resize((30, length), Image.Resampling.NEAREST), (x, TOP))
        pen.rectangle((x - 1, TOP - 1, x + 30, TOP + length), outline=FAINT)
        for at in (1, 0.5, 0, -0.5, -1) if scale.signed else (1, 0.75, 0.5, 0.25, 0):
            y = TOP + (1 - at) * (length - 1) / (2 if scale.signed else 1)
            sign = "-" if at < 0 else ""
            pen.line((x + 30, y, x + 38, y), FAINT, 2)
            pen.text((x + 46, y), f"{sign}{scale.value(abs(at)):.2g}", INK, _font(22), anchor="lm")
    if bool((shown == 0).any()):
        y = TOP + height - 30
        pen.rectangle((x, y, x + 29, y + 29), fill=BLANK, outline=FAINT)
        pen.text((x + 46, y + 15), "exactly 0", INK, _font(22), anchor="lm")


def _ticks(count: int) -> list[int]:
    """Four to eight round positions."""
    step = next(size * 10**power for power in range(9) for size in (1, 2, 4, 5) if size * 10**power * 8 >= count)
    return list(range(0, count, step))


def _fitting(text: str, size: int, width: int) -> FreeTypeFont | ImageFont:
    """A font of this size, or the largest smaller size in which the text fits the width."""
    return next((_font(one) for one in range(size, 9, -1) if _font(one).getlength(text) <= width), _font(9))


def _font(size: int) -> FreeTypeFont | ImageFont:
    """A font with mathematical symbols if the system has one, else Pillow's default font."""
    from PIL import ImageFont

    for name in ("DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf"):
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
