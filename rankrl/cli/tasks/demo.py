"""`task=demo`: a finished network and the dense one, in a browser."""

from __future__ import annotations

from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks.verify_kit import verify_kit
from rankrl.runs.run_folder import RunFolder


def demo(config: AppConfig, folder: RunFolder) -> None:
    """Write what `task=verify_kit` does, to be opened as index.html#start."""
    verify_kit(config, folder)
