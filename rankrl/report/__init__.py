"""Report runs: pages, plots, CSV files and tables on the terminal."""

from __future__ import annotations

from rankrl.plan_search.scores.evaluation import EPISODE_COLUMNS, EpisodeRow
from rankrl.report.run_folder import (
    LayerRow,
    RunReport,
    collect_setup,
    gather_runs,
    read_episodes,
    read_metrics,
)
from rankrl.report.run_tables import ReportError, heldout_note
from rankrl.report.sweep_page import load_runs, results_table, write_sweep_report
from rankrl.report.write import (
    conclusion,
    device_table,
    measured_table,
    run_page,
    runtimes_table,
    summary_table,
    write_report,
)

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
    "write_report",
    "write_sweep_report",
]
