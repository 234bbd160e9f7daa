"""The table that a sweep prints at its end."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from rich.table import Table

from rankrl.report.gather import gather_runs
from rankrl.report.sweep_table import SCORE, shown_columns, table_rows
from rankrl.wording import counted

_TITLES = {
    "accuracy": "Accuracy",
    "accuracy_change_points": "Points",
    "params_ratio": "Params",
    "macs_ratio": "MACs",
    "latency_ratio": "Latency",
}
_NOTE = "2.00×: half of the dense network's"
_MOST_ROWS = 40
_NAME = 28


def results_table(folder: str | Path) -> Table:
    """Return the finished runs below a folder for the terminal, the best first."""
    runs = [run for run in gather_runs(folder) if run.status == "finished"]
    columns = {column.key: column for column in shown_columns(runs)}
    shown = [columns[key] for key in ("folder", SCORE, *_TITLES) if key in columns]
    rows = table_rows(runs, shown)
    more = [f"{counted(len(rows) - _MOST_ROWS, 'more run')}"] if len(rows) > _MOST_ROWS else []
    note = [_NOTE] if "params_ratio" in columns else []
    page = f"`rankrl task=report runs={folder}` writes the page"
    table = Table(title=counted(len(rows), "finished run"), caption="; ".join([*more, *note, page]))
    for index, column in enumerate(shown):
        table.add_column(
            _TITLES.get(column.key, column.title), justify="right" if index else "left", overflow="fold"
        )
    for name, *row in rows[:_MOST_ROWS]:
        # A job's name is broken between its options.
        lines = wrap(name.text.replace("+", "+ "), _NAME, break_long_words=False, break_on_hyphens=False)
        table.add_row("\n".join(lines).replace("+ ", "+"), *(cell.text for cell in row))
    return table
