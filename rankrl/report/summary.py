"""Make the tables of results for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich import table as terminal

from rankrl.errors import counted
from rankrl.report.gather import gather_runs
from rankrl.report.run_tables import (
    AGREEMENT,
    certificate_note,
    device_note,
    device_rows,
    estimate_note,
    measured_note,
    measured_rows,
    qualities,
    remains,
    runtime_note,
    runtime_rows,
)
from rankrl.report.stages import (
    dense_int8,
    format_bytes,
    format_count,
    format_large,
    format_latency,
    format_ratio,
    latency_change,
    latency_note,
    number,
    ratio,
    stages,
)
from rankrl.report.sweep_table import SCORE, shown_columns, table_rows

_TITLES = {
    "accuracy": "Accuracy",
    "accuracy_change_points": "Points",
    "params_ratio": "Params",
    "macs_ratio": "MACs",
    "latency_ratio": "Latency",
}
_NOTE = "2.00×: half of the dense network's"
_MOST_ROWS = 40
_NAME = 28  # characters of a run's name in a line


def results_table(folder: str | Path) -> terminal.Table:
    """Return the finished runs below a folder for the terminal, the best first."""
    runs = [run for run in gather_runs(folder) if run.status == "finished"]
    columns = {column.key: column for column in shown_columns(runs)}
    shown = [columns[key] for key in ("folder", SCORE, *_TITLES) if key in columns]
    rows = table_rows(runs, shown)
    more = [f"{counted(len(rows) - _MOST_ROWS, 'more run')}"] if len(rows) > _MOST_ROWS else []
    note = [_NOTE] if "params_ratio" in columns else []
    page = f"`rankrl task=report runs={folder}` writes the page"
    table = terminal.Table(title=counted(len(rows), "finished run"), caption="; ".join([*more, *note, page]))
    for index, column in enumerate(shown):
        table.add_column(
            _TITLES.get(column.key, column.title), justify="right" if index else "left", overflow="fold"
        )
    for name, *row in rows[:_MOST_ROWS]:
        # Break a job's name between its options.
        lines = wrap(name.text.replace("+", "+ "), _NAME, break_long_words=False, break_on_hyphens=False)
        table.add_row("\n".join(lines).replace("+ ", "+"), *(cell.text for cell in row))
    return table


_TERMINAL = 80
"""Characters that a usual terminal shows in a line."""
_ATTRIBUTES = {"Test accuracy": "accuracy", AGREEMENT: "agreement"}
_COST_WORDS = {"Parameters": "parameters", "MACs": "MACs", "Time": "time", "Bytes of the file": "bytes"}


def comparison_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the before/after table as (titles, rows): accuracy, parameters, MACs, latency and file size."""
    run_stages = stages(metrics)
    if not run_stages:
        return [], []
    first, last = run_stages[0], run_stages[-1]

    def reduction(name: str, attribute: str, better: str, worse: str) -> str:
        before, after = getattr(first, attribute), getattr(last, attribute)
        return format_ratio(ratio(metrics, name, before, after), better, worse)

    table: list[tuple[str, Any, str, str]] = [
        ("Parameters", format_count, "params", reduction("params", "params", "fewer", "more")),
        ("MACs", format_large, "macs", reduction("macs", "macs", "fewer", "more")),
        ("Latency", format_latency, "latency_ms", latency_change(metrics, first.latency_ms, last.latency_ms)),
        ("File", format_bytes, "file_bytes", reduction("file_bytes", "file_bytes", "smaller", "larger")),
    ]
    several, rival = len(run_stages) > 1, dense_int8(metrics)
    rivals = [] if rival is None else [rival]
    rows = [
        [
            each.title,
            *map(each.write, each.values),
            *([each.change] if several else []),
            *(each.write(getattr(stage, _ATTRIBUTES.get(each.title, "score"))) for stage in rivals),
        ]
        for each in qualities(metrics)
    ] + [
        [
            title,
            *(write(getattr(stage, attribute)) for stage in run_stages),
            *([change] if several else []),
            *(write(getattr(stage, attribute)) for stage in rivals),
        ]
        for title, write, attribute, change in table
        if any(getattr(stage, attribute) is not None for stage in run_stages)
    ]
    names = [*(stage.name for stage in run_stages), *(["Change"] if several else [])]
    return ["", *names, *(stage.name for stage in rivals)], rows


def summary_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the before/after table for the terminal."""
    columns, rows = comparison_rows(metrics)
    name = " on ".join(str(metrics[key]) for key in ("model", "dataset") if metrics.get(key))
    known = number(metrics, "onnx", "latency_ratio_low") is not None
    return _table(columns, rows, title=name or None, caption=latency_note(metrics) if known else None)


def conclusion(metrics: Mapping[str, Any]) -> str:
    """Return the result of a run and the certified loss in words; empty if it compressed nothing."""
    bars = remains(metrics)
    costs = [f"{bar.share} of the {_COST_WORDS[bar.name]}" for bar in bars if not bar.good_if_kept]
    if not costs:
        return ""
    needs = f"{', '.join(costs[:-1])} and {costs[-1]}" if len(costs) > 1 else costs[0]
    sentences = [
        f"The compressed network needs {needs}{_worth(metrics)}.",
        certificate_note(metrics),
        estimate_note(metrics),
    ]
    return " ".join(filter(None, sentences))


def _worth(metrics: Mapping[str, Any]) -> str:
    """Return the compressed network's quality by its most important measure; empty if unknown."""
    known = [each for each in qualities(metrics) if each.before is not None and each.after is not None]
    if not known:
        return ""
    best = known[0]
    article = "an" if best.words[0].lower() in "aeiou" else "a"
    return f" for {article} {best.words} of {best.write(best.after)} instead of {best.write(best.before)}"


def runtimes_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of runtimes for the terminal; without rows if only one was measured."""
    return _table(*runtime_rows(metrics), caption=runtime_note(metrics))


def measured_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of measured plans for the terminal; without rows if none was measured."""
    return _table(*measured_rows(metrics), caption=measured_note(metrics))


def device_table(metrics: Mapping[str, Any]) -> terminal.Table:
    """Return the table of networks measured on another device; without rows if none was."""
    return _table(*device_rows(metrics), caption=device_note(metrics))


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, caption: str | None
) -> terminal.Table:
    table = terminal.Table(title=title, title_style="bold", header_style="bold", caption=caption)
    cells = [max((len(row[index]) for row in rows), default=0) for index in range(len(columns))]
    wide = sum(map(max, cells, map(len, columns))) + 3 * len(columns) + 1 > _TERMINAL
    for index, (column, width) in enumerate(zip(columns, cells, strict=True)):
        heading = "\n".join(wrap(column, max(1, width), break_long_words=False)) if wide else column
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
