"""Report runs: pages, plots, CSV files and tables on the terminal."""

from __future__ import annotations

from rankrl.report.run_folder import LayerRow, RunReport, collect_setup
from rankrl.report.run_tables import ReportError, conclusion
from rankrl.report.sweep_page import load_runs, results_table, write_sweep_report
from rankrl.report.write import run_page, write_report

__all__ = [
    "LayerRow",
    "ReportError",
    "RunReport",
    "collect_setup",
    "conclusion",
    "load_runs",
    "results_table",
    "run_page",
    "write_report",
    "write_sweep_report",
]
