"""The page of many runs: Pareto front, table, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rankrl.files import write_atomically
from rankrl.report.figures import NARROW
from rankrl.report.gather import GatheredRun, Status, gather_runs
from rankrl.report.html_page import Drawing, Head, Table, drawing, render, text_table
from rankrl.report.pareto import (
    COSTS,
    dense_costs,
    dense_network,
    pareto_figure,
    plotted,
    rivals,
    with_fronts,
)
from rankrl.report.provenance import date_line
from rankrl.report.quality import score_quality
from rankrl.report.run_page import run_title
from rankrl.report.seed_means import mean_rows, mean_table
from rankrl.report.stages import format_accuracy
from rankrl.report.sweep_table import run_rows, runs_csv, shared_values, shown_columns, table_rows

PAGE_FILE = "report.html"
CSV_FILE = "runs.csv"


def write_sweep_report(folder: str | Path) -> Path:
    """Write the page and the CSV file of all runs below a folder into that folder."""
    folder = Path(folder)
    runs = with_fronts(gather_runs(folder))
    write_atomically(folder / CSV_FILE, runs_csv(runs))
    write_atomically(folder / PAGE_FILE, sweep_page(runs, folder, date=date_line()))
    return folder / PAGE_FILE


def load_runs(folder: str | Path, *, average_seeds: bool = False) -> list[dict[str, Any]]:
    """Read the results of all runs below a folder, as rows for `pandas.DataFrame`.

    Args:
        folder: A sweep's folder, or any that holds run folders.
        average_seeds: Whether runs that differ in their seed alone become one row, with the means of their
            numbers, half of each mean's 95 % interval (`accuracy_interval`) and how many they are (`runs`).

    Returns:
        A row for every run: its folder and status, a key for every option in which runs differ, and the
        numbers of `runs.csv`.

    Raises:
        ReportError: The folder holds no run, or is one run itself.
    """
    runs = with_fronts(gather_runs(folder))
    return mean_rows(runs) if average_seeds else run_rows(runs)


def sweep_page(runs: Sequence[GatheredRun], folder: Path, *, date: str = "") -> str:
    """Write the page of many runs as one self-contained HTML document."""
    finished = [run for run in runs if run.status == "finished"]
    titles = {run_title(run.metrics) for run in finished}
    title = titles.pop() if len(titles) == 1 else folder.resolve().name
    counts = Counter(run.status for run in runs)
    states = [f"{counts[status]} {status}" for status in get_args(Status) if counts[status]]
    return render(
        "sweep",
        Head(title, [folder.resolve().name, *states, *([date] if date else [])], cards=_headline(runs)),
        pareto=_pareto(finished),
        runs=_table(finished),
        means=mean_table(finished),
        warnings=_warnings(finished),
        others=_others(runs),
        shared=shared_values(finished),
    )


def _headline(runs: Sequence[GatheredRun]) -> list[tuple[str, str, str]]:
    """Return the most accurate run, and the smallest and the fastest that lose at most a point."""
    values = []
    measured = [run for run in runs if run.final is not None and run.final.accuracy is not None]
    if measured:
        best = max(measured, key=_accuracy)
        values.append(("Most accurate", format_accuracy(_accuracy(best)), _name(best)))
    else:
        values += _best_score(runs)
    for title, cost in (
        ("Fewest parameters", "params"),
        ("Fewest MACs", "macs"),
        ("Least latency", "latency"),
        ("Smallest file", "bytes"),
    ):
        dense = dense_costs(measured, cost)
        near = [
            (value / dense[dense_network(run)][0], run)
            for run, value, accuracy in plotted(measured, cost)
            if dense_network(run) in dense and accuracy >= dense[dense_network(run)][1] - 0.01
        ]
        if near:
            kept, run = min(near, key=lambda pair: pair[0])
            note = f"{_name(run)}, {format_accuracy(_accuracy(run))}; at most 1 point lost"
            change = (
                run.latency_change
                if cost == "latency"
                else f"{1 / kept:.2f}× {'smaller' if cost == 'bytes' else 'fewer'}"
            )
            values.append((title, change, note))
    return values


def _best_score(runs: Sequence[GatheredRun]) -> list[tuple[str, str, str]]:
    """Return the run with the highest score, where all call it the same."""
    scores = [(quality, run) for run in runs if (quality := score_quality(run.metrics)) is not None]
    known = [(quality.after, quality, run) for quality, run in scores if quality.after is not None]
    if len({quality.title for _, quality, _ in known}) != 1:
        return []
    after, quality, run = max(known, key=lambda each: each[0])
    return [(f"Highest {quality.words}", quality.write(after), _name(run))]


def _accuracy(run: GatheredRun) -> float:
    accuracy = None if run.final is None else run.final.accuracy
    return -1.0 if accuracy is None else accuracy


def _name(run: GatheredRun) -> str:
    return ", ".join(part for part in (run.method.replace("_", " "), run.budget) if part)


def _pareto(runs: Sequence[GatheredRun]) -> Drawing | None:
    if not any(plotted(runs, cost) for cost in COSTS):
        return None
    caption = (
        "Each point is a run, as it ended. The line joins what nothing else beats in both accuracy and cost, "
        "the dense network and its 8-bit integers included. Accuracy is that on the test set, which "
        "chose nothing."
    )
    if plotted(runs, "latency"):
        caption += (
            " Latency is that of the ONNX file, as a share of the dense network's, timed in turns with it."
        )
    if any(rivals(runs, cost) for cost in COSTS):
        caption += (
            " The square is the dense network in 8-bit integers, by the runtime's own means and without any "
            "compression: the first rival."
        )
    return drawing(
        lambda size: pareto_figure(runs, narrow=size == NARROW),
        "pareto",
        "Test accuracy over parameters, MACs, latency and bytes of every run. The table below holds them.",
        caption,
    )


def _table(runs: Sequence[GatheredRun]) -> Table | None:
    if not runs:
        return None
    columns = shown_columns(runs)
    return Table(
        "The first column leads to the run's own page. A run is "
        "best in a cost where nothing that costs no more is as accurate, and in all at once where no other "
        "run is better in one measure and no worse in the others.",
        [column.title for column in columns],
        table_rows(runs, columns),
        [index for index, column in enumerate(columns) if column.is_text],
    )


def _warnings(runs: Sequence[GatheredRun]) -> Table | None:
    rows = [[str(run.folder), str(text)] for run in runs for text in run.metrics.get("warnings") or ()]
    caption = "What these runs warn of; their numbers may mean little."
    return text_table(caption, ["Folder", "Warning"], rows, text_columns=(0, 1))


def _others(runs: Sequence[GatheredRun]) -> Table | None:
    rows = [[str(run.folder), run.status, run.error] for run in runs if run.status != "finished"]
    caption = "The sweep's command, given again with the same hydra.sweep.dir, runs these, no others."
    return text_table(caption, ["Folder", "State", "Error"], rows, text_columns=(0, 1, 2))
