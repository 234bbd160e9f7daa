"""The page and the files of a comparison of selectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rankrl.files import write_atomically
from rankrl.report.comparison import (
    PROGRESS_CAPTION,
    ComparisonRow,
    comparison_cells,
    comparison_csv,
    comparison_markdown,
    interval_note,
    progress_cells,
    summarise,
)
from rankrl.report.comparison_figure import accuracies_figure, rewards_figure
from rankrl.report.html_page import Head, drawing, render, text_table
from rankrl.report.run_page import run_title
from rankrl.report.stages import heldout_note, number, rival_note
from rankrl.report.write import save_figure

_CAPTION = (
    "Every selector had the same evaluator, the same fits and as many evaluations. Test images gave the test "
    "accuracy and nothing else. Best reward first."
)


def comparison_page(
    rows: Sequence[ComparisonRow], metrics: Mapping[str, Any], setup: Mapping[str, str]
) -> str:
    """Write the page of a comparison as one self-contained HTML document."""
    baseline = number(metrics, "baseline", "accuracy")
    columns, cells = comparison_cells(rows)
    rival = rival_note(metrics)
    note = interval_note(summary.runs for summary in summarise(rows))
    explained = f" Numbers: {note}." if note else ""
    notes = (f"{_CAPTION}{explained}", f"{rival}." if rival else "", heldout_note(metrics))
    return render(
        "comparison",
        Head(f"Selectors compared: {run_title(metrics)}", warnings=metrics.get("warnings") or ()),
        result=text_table(" ".join(filter(None, notes)), columns, cells),
        rewards=drawing(
            partial(rewards_figure, rows),
            "rewards",
            "Best reward so far of every selector over the episodes; the table holds the last values.",
            "Mean over the seeds; the band spans them. Dashed: selectors with a single plan.",
        ),
        progress=text_table(f"{PROGRESS_CAPTION}{explained}", *progress_cells(rows)),
        accuracies=drawing(
            partial(accuracies_figure, rows, baseline),
            "accuracies",
            "Test accuracy of every search's plan. The table above holds the means.",
            "One dot for each search.",
        ),
        setup=setup,
    )


def write_comparison(
    folder: Path, rows: Sequence[ComparisonRow], metrics: Mapping[str, Any], setup: Mapping[str, str]
) -> Path:
    """Write `compare.csv`, `compare.md`, the plots and `report.html`; return the page's path."""
    write_atomically(folder / "compare.csv", comparison_csv(rows))
    write_atomically(folder / "compare.md", comparison_markdown(rows))
    save_figure(rewards_figure(rows), folder / "plots" / "rewards.png")
    baseline = number(metrics, "baseline", "accuracy")
    save_figure(accuracies_figure(rows, baseline), folder / "plots" / "accuracies.png")
    document = folder / "report.html"
    write_atomically(document, comparison_page(rows, metrics, setup))
    return document
