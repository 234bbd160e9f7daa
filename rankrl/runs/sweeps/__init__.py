"""Sweeps: many runs of one command line, each guarded, skipped when finished, and listed when it failed.

`job` carries out one of them, `failures` keeps what went wrong, `callback` lists it at the end, `devices`
deals out GPUs.
"""

from __future__ import annotations

from rankrl.runs.sweeps.job import run_sweep_job

__all__ = ["run_sweep_job"]
