"""`task=report`: one page for many runs."""

from __future__ import annotations

from rich.console import Console

from rankrl.cli.config.schema import AppConfig
from rankrl.errors import ConfigError
from rankrl.report import write_sweep_report
from rankrl.runs.run_folder import RunFolder


def report(config: AppConfig, folder: RunFolder) -> None:
    """Write `report.html` and `runs.csv` into the folder of the runs."""
    if not config.runs:
        raise ConfigError("task=report needs runs=FOLDER, the folder of a sweep or of several runs")
    page = write_sweep_report(config.runs)
    Console().print(f"report: {page}", soft_wrap=True)
