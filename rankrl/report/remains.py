"""What is left of a network: the share of each measure that the compressed one keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankrl.report.quality import qualities
from rankrl.report.stages import (
    format_bytes,
    format_count,
    format_large,
    format_latency,
    format_share,
    number,
    ratio,
    stages,
)


@dataclass(frozen=True)
class Remaining:
    """One bar."""

    name: str
    kept: float
    share: str
    note: str
    good_if_kept: bool = False

    @property
    def width(self) -> float:
        """Length of the bar in per cent; what is beyond 0 or everything is drawn as that."""
        return round(100 * min(1.0, max(0.0, self.kept)), 2)

    @property
    def is_more(self) -> bool:
        """Whether a cost has grown."""
        return self.kept > 1 and not self.good_if_kept


def remains(metrics: Mapping[str, Any]) -> list[Remaining]:
    """Return a bar for what was measured of quality, parameters, MACs, time and bytes."""
    run_stages = stages(metrics)
    if len(run_stages) < 2:
        return []
    first, last = run_stages[0], run_stages[-1]
    bars = []
    for quality in qualities(metrics):
        before, after = quality.before, quality.after
        if before is not None and before > 0 and after is not None:
            note, kept = f"{quality.write(after)} of {quality.write(before)}", after / before
            bars.append(Remaining(quality.title, kept, format_share(kept), note, good_if_kept=True))
    sizes = (number(metrics, "onnx", "baseline_file_bytes"), number(metrics, "onnx", "file_bytes"))
    for name, key, before, after, write in (
        ("Parameters", "params", first.params, last.params, format_count),
        ("MACs", "macs", first.macs, last.macs, format_large),
        ("Time", "latency", first.latency_ms, last.latency_ms, format_latency),
        ("Bytes of the file", "file_bytes", *sizes, format_bytes),
    ):
        if before and after is not None:
            fewer = ratio(metrics, key, before, after)
            kept = after / before if not fewer else 1 / fewer
            bars.append(Remaining(name, kept, format_share(kept), f"{write(after)} of {write(before)}"))
    return bars
