"""Test all pages alike: whole, self-contained, in the theme's colours, text never markup."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from html_outline import outline

from rankrl.report import RunReport, run_page, write_sweep_report
from rankrl.report.comparison import ComparisonRow, comparison_page

HOSTILE = "\"'><script>alert(1)"


def of_a_run(run: RunReport, folder: Path, text: str) -> str:
    metrics = {**run.metrics, "model": text, "decomposition": text, "warnings": [text]}
    return run_page(dataclasses.replace(run, metrics=metrics, setup={text: text}))


def of_a_comparison(run: RunReport, folder: Path, text: str) -> str:
    row = ComparisonRow(text, 0, 0.55, 0.6, 0.4, 0.5, 0.7, 0.8, 3, 3, 1.5, (0.5, 0.52, 0.55))
    return comparison_page([row], {**run.metrics, "model": text, "warnings": [text]}, {text: text})


def of_a_sweep(run: RunReport, folder: Path, text: str) -> str:
    for seed in (0, 1):
        job = folder / f"{text}{seed}"
        job.mkdir()
        metrics = {**run.metrics, "seed": seed, "model": text, "selector": text, "warnings": [text]}
        (job / "metrics.json").write_text(json.dumps(metrics))
    (folder / "failed").mkdir()
    (folder / "failed" / "error.json").write_text(json.dumps({"error": text}))
    return write_sweep_report(folder).read_text()


Page = Callable[[RunReport, Path, str], str]
PAGES = [of_a_run, of_a_comparison, of_a_sweep]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole_and_needs_nothing_from_outside(
    page: Page, whole_run: RunReport, tmp_path: Path
) -> None:
    document = page(whole_run, tmp_path, "text")
    attributes = outline(document).attributes
    assert not re.search(r"https?:|@import|<script|<link|<img| src=", document)
    identifiers = [value for name, value in attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    labelled = [value for name, value in attributes if name == "aria-labelledby"]
    targets = re.findall(r"url\(#([^)]*)\)", document) + re.findall(r'href="#([^"]*)"', document)
    assert set(labelled + targets) <= set(identifiers)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", document))
    drawings = re.findall(r"<svg.*?</svg>", document, re.DOTALL)
    assert len(drawings) == (2 if page is of_a_run else 1)
    assert not any(re.search(r"#[0-9a-f]{6}\b", drawing) for drawing in drawings)
    assert all('role="img" aria-label="' in drawing for drawing in drawings)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("page", PAGES)
def test_text_from_the_run_is_never_markup(page: Page, whole_run: RunReport, tmp_path: Path) -> None:
    document = page(whole_run, tmp_path, HOSTILE)
    outline(document)
    assert "<script" not in document
    assert document.count("&lt;script&gt;alert(1)") >= 5
