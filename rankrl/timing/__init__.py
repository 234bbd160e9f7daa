"""Time files, layers and networks, and find the ranks that are fast on this processor."""

from __future__ import annotations

from rankrl.timing.form import fast_multiple, suited_multiple
from rankrl.timing.latency import (
    Latency,
    LatencyComparison,
    TimedTurns,
    compare_latency,
    is_unchanged,
    measure_latency,
    time_in_turns,
)
from rankrl.timing.network_timer import NetworkTimer

__all__ = [
    "Latency",
    "LatencyComparison",
    "NetworkTimer",
    "TimedTurns",
    "compare_latency",
    "fast_multiple",
    "is_unchanged",
    "measure_latency",
    "suited_multiple",
    "time_in_turns",
]
