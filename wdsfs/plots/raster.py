"""A plot as PNG, drawn by Pillow: on white, at twice the size, in the font that Pillow brings."""

from __future__ import annotations

import importlib.util
import io

from wdsfs.errors import UsageError
from wdsfs.extras import install_command
from wdsfs.plots.drawing import COLOURS, FONT_SIZE, INK, Box, Figure, clean

SCALE = 2
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def need_pillow() -> None:
    """Raise UsageError without Pillow."""
    if importlib.util.find_spec("PIL") is None:
        raise UsageError(f"PNG needs Pillow; name a file that ends in .svg, or type: {install_command('view')}")


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG file. Raises UsageError without Pillow."""
    need_pillow()
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (figure.width * SCALE, figure.height * SCALE), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE * SCALE)
    for shape in figure.shapes:
        x, y = shape.x * SCALE, shape.y * SCALE
        if isinstance(shape, Box):
            right, bottom = x + max(shape.width * SCALE, 1) - 1, y + max(shape.height * SCALE, 1) - 1
            draw.rectangle((x, y, max(right, x), max(bottom, y)), COLOURS[shape.role])
        else:
            bold = 0.5 if shape.bold else 0
            anchor = _ANCHORS[shape.anchor]
            draw.text((x, y), clean(shape.text), COLOURS[INK], font, anchor, stroke_width=bold)
    target = io.BytesIO()
    image.save(target, "PNG", optimize=True)
    return target.getvalue()
