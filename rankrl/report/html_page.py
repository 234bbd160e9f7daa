"""What a page shows, as plain values; `templates/` says how they look. No page needs an outside file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from rankrl.report.figures import NARROW, WIDE
from rankrl.report.svg import inline_svg

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
    """A figure in two drawings, of which the page shows the one that fits the window."""

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
    """Return a table of plain text; None where it has no rows."""
    cells = [[Cell(text) for text in row] for row in rows]
    return Table(caption, columns, cells, text_columns) if cells else None


def render(template: str, head: Head, **content: Any) -> str:
    """Write a page as one self-contained HTML document."""
    return _TEMPLATES.get_template(f"{template}.html.jinja").render(head=head, **content)
