"""Define the decorator of the functions that users call."""

from __future__ import annotations

from decomposition.public_calls import PublicCalls

verb = PublicCalls()
"""One call at a time: the process has one `torch.export` and one standard error, and times are measured."""
