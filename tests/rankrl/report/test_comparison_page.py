"""The page of a comparison of selectors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from rankrl.report.comparison import ComparisonRow
from rankrl.report.comparison_page import comparison_page

HOSTILE = '"><script>alert(1)</script>'


def row(selector: str, seed: int) -> ComparisonRow:
    rewards = (0.5, 0.52, 0.55 + seed / 100)
    return ComparisonRow(selector, seed, rewards[-1], 0.6, 0.4, 0.5, 0.7, 0.8, 3, 3, 1.5, rewards)


@pytest.fixture
def rows() -> list[ComparisonRow]:
    return [row(selector, seed) for selector in ("ddpg", "random") for seed in (0, 1)]


def test_the_page_has_its_sections_and_needs_nothing_from_outside(
    rows: list[ComparisonRow], metrics: Mapping[str, Any]
) -> None:
    page = comparison_page(rows, metrics, {"Seed": "0"})
    assert "<h1>Selectors compared: resnet20 on cifar10</h1>" in page
    headings = re.findall(r"<h2[^>]*>([^<]*)", page)
    assert headings == ["Result", "Search", "Test accuracy", "Setup"]
    assert page.count("<svg") == 4  # two figures, each for wide and for narrow windows
    assert "0.5550 ± 0.0071" in page
    assert not re.search(r"https?:|@import|<script|<link|<img| src=", page)


def test_text_from_the_run_is_never_markup(metrics: Mapping[str, Any]) -> None:
    content = {**metrics, "model": HOSTILE, "warnings": [HOSTILE]}
    page = comparison_page([row(HOSTILE, 0)], content, {HOSTILE: HOSTILE})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6  # title, heading, warning, table, and both sides of the setup
