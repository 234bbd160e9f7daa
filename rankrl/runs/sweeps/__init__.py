"""Run sweeps: many runs of one command line, skipped when finished, and listed when failed.

`job` runs one of them on a GPU of its own, `progress` records failures and shows the state of the sweep,
`launching` starts jobs in other processes.
"""

from __future__ import annotations

from rankrl.runs.sweeps.job import run_sweep_job

__all__ = ["run_sweep_job"]
