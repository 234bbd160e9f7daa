"""The error that the report package raises."""

from __future__ import annotations

from rankrl.errors import RankrlError


class ReportError(RankrlError):
    """A run folder lacks a file that the report needs, or holds a damaged one."""
