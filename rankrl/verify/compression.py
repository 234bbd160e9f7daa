"""What is known of a compressed network, wherever it came from: the same words for files and for modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decomposition import CompressionPlan
from rankrl.timing.latency import LatencyComparison
from rankrl.verify.agreement import OutputAgreement, agreement_score


@dataclass(frozen=True)
class Compression:
    """A compressed network as an ONNX file and what is known of it.

    Attributes:
        path: The file.
        plan: What became of every layer.
        before: `params`, `macs`, `bytes` (of the parameters) and `file_bytes` of the original.
        after: The same of the compressed network.
        outputs: How far each output agrees with the original's on the held-out inputs.
        score: The user's score of the compressed network, or the agreement of its outputs (1 at most).
        baseline_score: The same of the original.
        verified: Largest difference between the file and the network that it was made from.
        errors: Relative output error of each layer that was touched, by name.
        latency: Its time beside the original's.
        collapsed: What to tell a reader if it answers no better than a constant, else None.
    """

    path: Path
    plan: CompressionPlan
    before: Mapping[str, int]
    after: Mapping[str, int]
    outputs: tuple[OutputAgreement, ...]
    score: float
    baseline_score: float
    verified: float
    errors: Mapping[str, float]
    latency: LatencyComparison
    collapsed: str | None = field(default=None, kw_only=True)

    @property
    def untouched(self) -> dict[str, str]:
        """The reason for each layer that stays as it is, by name."""
        return {layer.name: layer.reason or "" for layer in self.plan if not layer.operations}


def missed_latency(budget: float | None, times: LatencyComparison) -> str | None:
    """Return what to tell a reader if a finished file misses its budget in time, else None.

    Args:
        budget: Fraction of the original's time to keep at most, or None for no such budget.
        times: The file's time beside the original's.
    """
    kept = 1 / times.ratio
    if budget is None or kept <= budget:
        return None
    return (
        f"budget.latency={budget} is missed: the finished file keeps {kept:.3f} of the original's time. "
        "Measure on a quiet machine, or ask for a little less"
    )


def summary(result: Compression) -> dict[str, Any]:
    """Return what metrics.json says of a compressed network."""
    times = result.latency
    return {
        "baseline": {**result.before, "score": result.baseline_score, "agreement": 1.0},
        "compressed": {
            **result.after,
            "score": result.score,
            "agreement": agreement_score(result.outputs),
        },
        "outputs": {
            each.name: {"error": each.error, **({} if each.top1 is None else {"top1": each.top1})}
            for each in result.outputs
        },
        "ratios": {
            **{
                name: result.before[name] / max(1, result.after[name])
                for name in ("params", "macs", "bytes", "file_bytes")
            },
            "latency": times.ratio,
        },
        "onnx": {
            "verified": result.verified,
            "latency_ms": times.compressed.median_ms,
            "baseline_latency_ms": times.baseline.median_ms,
            "latency_ratio_low": times.ratio_low,
            "latency_ratio_high": times.ratio_high,
            "batch": times.baseline.batch,
            "threads": times.baseline.threads,
            "runs": times.baseline.runs,
            "clock": times.baseline.clock,
            "busy": times.busy,
        },
        "untouched": result.untouched,
        "errors": dict(result.errors),
    }
