"""Time: how files and single layers are timed, and what is fast on this processor."""

from __future__ import annotations

from rankrl.timing.latency import (
    Latency,
    LatencyComparison,
    TimedTurns,
    compare_latency,
    is_unchanged,
    measure_latency,
    time_in_turns,
)
from rankrl.timing.layer_latency import measure_layer_latencies
from rankrl.timing.rank_step import fast_multiple

__all__ = [
    "Latency",
    "LatencyComparison",
    "TimedTurns",
    "compare_latency",
    "fast_multiple",
    "is_unchanged",
    "measure_latency",
    "measure_layer_latencies",
    "time_in_turns",
]
