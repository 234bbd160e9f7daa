"""Figures as inline SVG that follows the page's theme."""

from __future__ import annotations

import html
import io
import re

import matplotlib as mpl
from matplotlib.figure import Figure

from rankrl.report.figures import PALETTE

_WRAPPING = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", re.DOTALL)
_OPENING_TAG = re.compile(r"<svg[^>]*>", re.DOTALL)
_VIEW_BOX = re.compile(r'viewBox="[^"]*"')
_ID = re.compile(r' id="([^"]*)"')
_FONT = re.compile(r"font: ([\d.]+)px [^;\"]*")  # as older versions of matplotlib write it
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
