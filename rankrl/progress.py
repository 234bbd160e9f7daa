"""Progress of long work: `decomposition`'s, by which its own functions show theirs."""

from __future__ import annotations

from decomposition.progress import Progress, ProgressBar, in_words, listening, progress_bar

__all__ = ["Progress", "ProgressBar", "in_words", "listening", "progress_bar"]
