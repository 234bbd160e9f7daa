"""The parts that every page is made of (shell, sections, figures, tables), as HTML without outside files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from matplotlib.figure import Figure

from rankrl.report.svg import inline_svg


@dataclass(frozen=True)
class Cell:
    """A cell of a sortable table.

    Attributes:
        text: What it shows, plain text.
        value: What it is sorted by; None stands at the end.
        link: Where it leads, or None.
    """

    text: str
    value: float | str | None = None
    link: str | None = None

    @property
    def attribute(self) -> str:
        """The value as an attribute."""
        return "" if self.value is None else f' data-value="{escape(str(self.value))}"'

    @property
    def content(self) -> str:
        """The text, linked where it leads somewhere."""
        text = escape(self.text)
        return text if self.link is None else f'<a href="{escape(self.link)}">{text}</a>'


def page(title: str, header: str, sections: Sequence[str], *, script: str = "") -> str:
    """A complete document with its style inside.

    Args:
        title: The page's title, plain text.
        header: HTML for the top of the page.
        sections: HTML of each section; empty ones are left out.
        script: JavaScript to run at the end of the page, if any.

    Returns:
        The document.
    """
    style = resources.files("rankrl.report").joinpath("page.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in sections if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header>\n{header}\n</header>\n<main>\n{body}\n</main>\n"
        "<footer>Written by rankrl.</footer>\n"
        + (f"<script>\n{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def section(title: str, *content: str) -> str:
    """A section with its heading; empty where it has no content."""
    body = "\n".join(part for part in content if part)
    if not body:
        return ""
    identifier = title.lower().replace(" ", "-")
    heading = f'<h2 id="{identifier}">{escape(title)}</h2>'
    return f'<section aria-labelledby="{identifier}">\n{heading}\n{body}\n</section>'


def figure(wide: Figure, narrow: Figure, identifier: str, description: str, caption: str) -> str:
    """A figure in two drawings, of which the page shows the one that fits the window.

    Args:
        wide: The drawing for wide windows.
        narrow: The drawing for narrow ones.
        identifier: A name that no other figure of the page has.
        description: What the figure shows, for readers who cannot see it.
        caption: Text below it.

    Returns:
        A `<figure>` element.
    """
    return (
        f'<figure>\n<div class="wide">{inline_svg(wide, f"{identifier}-wide", description)}</div>\n'
        f'<div class="narrow">{inline_svg(narrow, f"{identifier}-narrow", description)}</div>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[int] = (0,)
) -> str:
    """A table that scrolls by itself where the window is too narrow for it.

    Args:
        caption: What the table holds, plain text.
        columns: Titles of the columns, plain text.
        rows: Cells of each row, plain text; the first cell is the row's heading.
        text_columns: Columns of words, which are set flush left; all others hold numbers.

    Returns:
        A `<table>` in a scrolling region that the keyboard can reach.
    """
    cells = [[Cell(text) for text in row] for row in rows]
    return _table(caption, columns, cells, text_columns, "<table>")


def sortable_table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    text_columns: Sequence[int] = (0,),
) -> str:
    """A table that the page's script sorts by the column whose title is clicked.

    Args:
        caption: What the table holds, plain text.
        columns: Titles of the columns, plain text.
        rows: Cells of each row; the first cell is the row's heading.
        text_columns: Columns of words, which are set flush left and sorted as text.

    Returns:
        A `<table>` in a scrolling region that the keyboard can reach.
    """
    return _table(caption, columns, rows, text_columns, '<table class="sortable">')


def _table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    text_columns: Sequence[int],
    opening: str,
) -> str:
    def kind(index: int) -> str:
        return ' class="text"' if index in text_columns else ""

    head = "".join(f'<th scope="col"{kind(index)}>{escape(name)}</th>' for index, name in enumerate(columns))
    body = "\n".join(
        f'<tr><th scope="row"{kind(0)}{row[0].attribute}>{row[0].content}</th>'
        + "".join(
            f"<td{kind(index)}{cell.attribute}>{cell.content}</td>"
            for index, cell in enumerate(row[1:], start=1)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<p class="caption">{escape(caption)}</p>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">\n'
        f"{opening}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def cards(values: Sequence[tuple[str, str, str]]) -> str:
    """Headline numbers: (name, value, note) each.

    Returns:
        A description list.
    """
    items = "\n".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd><dd>{escape(note)}</dd></div>'
        for name, value, note in values
    )
    return f'<dl class="cards">\n{items}\n</dl>' if values else ""


def warnings(metrics: Mapping[str, Any]) -> str:
    """The warnings of `metrics.json`, for the top of a page; empty where there are none."""
    items = "\n".join(f"<li>{escape(str(text))}</li>" for text in metrics.get("warnings") or ())
    return f'<ul class="warnings" aria-label="Warnings">\n{items}\n</ul>' if items else ""


def facts(values: Mapping[str, str]) -> str:
    """Names and their values, one per line."""
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
    return f'<dl class="facts">\n{items}\n</dl>' if values else ""
