"""Render pages as HTML, with figures as inline SVG in the page's theme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from rankrl.report.figures import NARROW, PALETTE, WIDE

_WRAPPING = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", re.DOTALL)
_OPENING_TAG = re.compile(r"<svg[^>]*>", re.DOTALL)
_VIEW_BOX = re.compile(r'viewBox="[^"]*"')
_ID = re.compile(r' id="([^"]*)"')
_FONT = re.compile(r"font: ([\d.]+)px [^;\"]*")  # the form of older versions of matplotlib
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_STYLE_SHEET = re.compile(r"<style.*?</style>", re.DOTALL)
_LINE_BREAK = re.compile(r"\s*\n\s*")


def inline_svg(figure: Figure, identifier: str, description: str) -> str:
    """Turn a figure into an `<svg>` element for use inside an HTML page.

    Its colours become CSS variables (`var(--accent)`, ...), its text stays text in the page's own font, and
    it refers to nothing outside the page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": identifier}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = _STYLE_SHEET.sub("", _WRAPPING.sub("", buffer.getvalue()))
    view_box = _VIEW_BOX.search(text)
    opening = (
        f'<svg role="img" aria-label="{html.escape(description)}" {view_box.group() if view_box else ""}>'
    )
    text = _OPENING_TAG.sub(lambda _: opening, text, count=1)
    text = _ID.sub(lambda match: match.group() if f"#{match.group(1)}" in text else "", text)
    text = _FONT_FAMILY.sub("", _FONT.sub(r"font-size: \1px", text))
    for role, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{role})")
    return _LINE_BREAK.sub("\n", text).strip()


_TEMPLATES = Environment(
    loader=PackageLoader("rankrl.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True)
class Head:
    """The top of a page."""

    title: str
    eyebrow: Sequence[str] = ()
    warnings: Sequence[str] = ()
    cards: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True)
class Drawing:
    """A figure in two sizes; the page shows the one that fits the window."""

    wide: str
    narrow: str
    caption: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    link: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row is the row's heading."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    text_columns: Sequence[int] = (0,)


def drawing(
    draw: Callable[[tuple[float, float]], Figure], identifier: str, description: str, caption: str
) -> Drawing:
    """Draw a figure for wide and for narrow windows."""
    wide, narrow = (
        inline_svg(draw(size), f"{identifier}-{name}", description)
        for name, size in (("wide", WIDE), ("narrow", NARROW))
    )
    return Drawing(wide, narrow, caption)


def text_table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[int] = (0,)
) -> Table | None:
    """Return a table of plain text; None without rows."""
    cells = [[Cell(text) for text in row] for row in rows]
    return Table(caption, columns, cells, text_columns) if cells else None


def render(template: str, head: Head, **content: Any) -> str:
    """Write a page as one self-contained HTML document."""
    return _TEMPLATES.get_template(f"{template}.html.jinja").render(head=head, **content)
