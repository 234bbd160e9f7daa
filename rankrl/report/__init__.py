"""Report runs: pages, plots, CSV files and tables on the terminal."""

from __future__ import annotations

from rankrl.plan_search.scores.history import EpisodeRow
from rankrl.report.gather import gather_runs
from rankrl.report.provenance import collect_setup
from rankrl.report.run_folder import EPISODE_COLUMNS, LayerRow, RunReport, read_episodes, read_metrics
from rankrl.report.stages import ReportError, heldout_note
from rankrl.report.summary import (
    conclusion,
    device_table,
    measured_table,
    results_table,
    runtimes_table,
    summary_table,
)
from rankrl.report.sweep_page import load_runs, sweep_page, write_sweep_report
from rankrl.report.write import run_page, write_report

__all__ = [
    "EPISODE_COLUMNS",
    "EpisodeRow",
    "LayerRow",
    "ReportError",
    "RunReport",
    "collect_setup",
    "conclusion",
    "device_table",
    "gather_runs",
    "heldout_note",
    "load_runs",
    "measured_table",
    "read_episodes",
    "read_metrics",
    "results_table",
    "run_page",
    "runtimes_table",
    "summary_table",
    "sweep_page",
    "write_report",
    "write_sweep_report",
]
