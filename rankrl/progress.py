"""Re-export the progress bars of `decomposition`, and log the seconds that a block takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from decomposition.progress import Progress, ProgressBar, in_words, listening, progress_bar

__all__ = ["Progress", "ProgressBar", "in_words", "listening", "logged_seconds", "progress_bar"]


@contextmanager
def logged_seconds(log: logging.Logger, what: str) -> Iterator[None]:
    """Log how long a block took, once it has ended."""
    start = time.perf_counter()
    yield
    log.info("%s: %.1f s", what, time.perf_counter() - start)
