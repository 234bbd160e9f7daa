"""A progress bar for terminals: description, bar, count, best value so far, time left."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """One running bar; made by `progress_bar`."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, steps: int = 1, *, best: float | None = None) -> None:
        """Move on by `steps`, and show `best` as the best value so far when it is given."""
        self._progress.advance(self._task, steps)
        self._show(best)

    def update(self, completed: int, *, best: float | None = None) -> None:
        """Set the number of finished steps, for callers that know the total and not the difference."""
        self._progress.update(self._task, completed=completed)
        self._show(best)

    def _show(self, best: float | None) -> None:
        if best is not None:
            self._progress.update(self._task, best=f"best {best:.4f}")


@contextmanager
def progress_bar(description: str, total: int, *, console: Console | None = None) -> Iterator[ProgressBar]:
    """Show a progress bar while the block runs; show nothing when standard output is no terminal.

    Example:
        with progress_bar("search", total=100) as bar:
            bar.advance(best=0.9)

    Args:
        description: What is being done, one or two words.
        total: Number of steps until done.
        console: Where to draw, for tests and embedding; it decides by itself whether it is a terminal.

    Yields:
        The bar to advance.
    """
    alone = multiprocessing.current_process().name == "MainProcess"  # bars of parallel jobs overwrite another
    visible = alone and sys.stdout.isatty() if console is None else console.is_terminal
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not visible,
    )
    with progress:
        yield ProgressBar(progress, progress.add_task(description, total=total, best=""))
