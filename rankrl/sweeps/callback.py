"""What happens before the first and after the last job of a sweep."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rankrl.files import write_json
from rankrl.sweeps.failures import SWEEP_FILE, failures
from rankrl.wording import counted

FAILED_JOBS = 1
"""Exit code of a sweep of which a job failed."""


class SweepCallback(Callback):
    """Gives each sweep an identifier, lists its failed jobs at the end and leaves with exit code 1 then.

    The identifier (`sweep.json` in the sweep's folder) tells this sweep's failures from those of an earlier
    one in the same folder. Configured under `hydra.callbacks`.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Write `sweep.json`."""
        folder = Path(str(config.hydra.sweep.dir))
        write_json(folder / SWEEP_FILE, {"id": secrets.token_hex(8)})

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """List the failed jobs.

        Raises:
            SystemExit: A job failed.
        """
        folder = Path(str(config.hydra.sweep.dir))
        failed = failures(folder)
        if not failed:
            return
        jobs = counted(len(failed), "job")
        print(f"rankrl: {jobs} of the sweep failed:", file=sys.stderr)
        for failure in failed:
            print(f"  {failure.folder.relative_to(folder)}: {failure.error}", file=sys.stderr)
        print(
            f"The same command with hydra.sweep.dir={folder} runs these again and skips the finished ones.",
            file=sys.stderr,
        )
        raise SystemExit(FAILED_JOBS)
