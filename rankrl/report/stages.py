"""Read the stages of a run from its metrics, and format their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankrl.errors import RankrlError, counted
from rankrl.timing import is_unchanged


class ReportError(RankrlError):
    """A run folder lacks a file that the report needs, or holds a damaged one."""


_SPACE = "\N{NO-BREAK SPACE}"

UNKNOWN = "–"
"""Stands where a number was not measured."""

UNCHANGED = "unchanged"
"""Stands where a time differs by no more than the noise."""

_SECTIONS = {"Baseline": "baseline", "Compressed": "compressed", "Fine-tuned": "finetuned"}
_CLOCKS = {"processor": "processor time", "wall": "time on the wall"}


@dataclass(frozen=True)
class Stage:
    """One state of the model; None where a number was not measured."""

    name: str
    accuracy: float | None = None
    params: float | None = None
    macs: float | None = None
    latency_ms: float | None = None
    agreement: float | None = None
    score: float | None = None
    file_bytes: float | None = None


def stages(metrics: Mapping[str, Any]) -> list[Stage]:
    """Return the stages that a run went through, read from its metrics."""
    run_stages = [
        Stage(name, *(number(metrics, key, field) for field in ("accuracy", "params", "macs")))
        for name, key in (("Baseline", "baseline"), ("Compressed", "compressed"))
        if metrics.get(key)
    ]
    if metrics.get("finetuned"):
        last, accuracy = run_stages[-1] if run_stages else Stage(""), number(metrics, "finetuned", "accuracy")
        if metrics.get("epochs") or accuracy != last.accuracy or "agreement" in metrics["finetuned"]:
            run_stages.append(Stage("Fine-tuned", accuracy, last.params, last.macs))
    latencies, sizes = {}, {}
    if run_stages:
        last_index = len(run_stages) - 1
        latencies[last_index] = number(metrics, "onnx", "latency_ms")
        sizes[last_index] = number(metrics, "onnx", "file_bytes")
        if run_stages[0].name == "Baseline":
            latencies[0] = number(metrics, "onnx", "baseline_latency_ms")
            sizes[0] = number(metrics, "onnx", "baseline_file_bytes")
    return [
        replace(
            stage,
            latency_ms=latencies.get(index),
            file_bytes=sizes.get(index),
            agreement=number(metrics, _SECTIONS[stage.name], "agreement"),
            score=number(metrics, _SECTIONS[stage.name], "score"),
        )
        for index, stage in enumerate(run_stages)
    ]


def dense_int8(metrics: Mapping[str, Any]) -> Stage | None:
    """Return the stage of the dense network in 8-bit integers; None if it was not measured."""
    if not metrics.get("dense_int8"):
        return None
    latency, faster = (
        number(metrics, "onnx", "baseline_latency_ms"),
        number(metrics, "dense_int8", "latency_ratio"),
    )
    return Stage(
        "Dense, int8",
        params=number(metrics, "baseline", "params"),
        macs=number(metrics, "baseline", "macs"),
        latency_ms=None if latency is None or faster is None else latency / faster,
        **{
            key: number(metrics, "dense_int8", key)
            for key in ("accuracy", "agreement", "score", "file_bytes")
        },
    )


def number(metrics: Mapping[str, Any], section: str, key: str) -> float | None:
    """Return one number of the metrics, or None if it is missing."""
    value = (metrics.get(section) or {}).get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ReportError(f"metrics.json: {section}.{key} is {value!r}; it must be a finite number.")
    return value


def heldout_note(metrics: Mapping[str, Any]) -> str:
    """Return a sentence for readers of held-out accuracies; empty where the network has not seen the images.

    A checkpoint trained by rankrl records its held-out images; for others the training images are unknown.
    """
    if not metrics.get("checkpoint") or metrics.get("heldout_is_new"):
        return ""
    return (
        "The checkpoint may have been trained on these held-out images; accuracies on them can then lie "
        "above that on the test set."
    )


def format_accuracy(accuracy: float | None) -> str:
    """Write a fraction as percent with two decimals."""
    return UNKNOWN if accuracy is None else f"{100 * accuracy:.2f}{_SPACE}%"


def format_share(share: float) -> str:
    """Write a fraction as percent with one decimal."""
    return f"{round(100 * share, 1) + 0.0:.1f}{_SPACE}%"  # + 0.0 turns -0.0 into 0.0


def format_count(count: float | None) -> str:
    """Write a count in full."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def format_large(count: float | None) -> str:
    """Write a count in thousands, millions or billions, to four digits."""
    if count is None:
        return UNKNOWN
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:#.4g}".rstrip(".") + _SPACE + name
    return f"{count:.0f}"


def format_bytes(count: float | None) -> str:
    """Write bytes in thousands, millions or billions, to four digits."""
    return UNKNOWN if count is None else f"{format_large(count)}B"


def format_latency(milliseconds: float | None) -> str:
    """Write milliseconds to three digits."""
    return UNKNOWN if milliseconds is None else f"{milliseconds:#.3g}".rstrip(".") + f"{_SPACE}ms"


def format_points(before: float | None, after: float | None) -> str:
    """Write the difference of two accuracies in percentage points, with its sign."""
    if before is None or after is None:
        return UNKNOWN
    points = round(100 * (after - before), 2)
    return "±0 points" if points == 0 else f"{points:+.2f} points".replace("-", "−")


def format_ratio(ratio: float | None, better: str, worse: str) -> str:
    """Write a ratio original ÷ compressed: `2.50× fewer` above 1, `1.20× more` below."""
    if ratio is None or ratio <= 0:
        return UNKNOWN
    return f"{ratio:.2f}× {better}" if ratio >= 1 else f"{1 / ratio:.2f}× {worse}"


def ratio(metrics: Mapping[str, Any], name: str, before: float | None, after: float | None) -> float | None:
    """Return the ratio original ÷ compressed: the metrics' own, or that of the two values."""
    recorded = number(metrics, "ratios", name)
    if recorded is not None or before is None or not after:
        return recorded
    return before / after


def latency_change(metrics: Mapping[str, Any], before: float | None, after: float | None) -> str:
    """Write `1.70× faster`, `1.25× slower`, or `unchanged` where two times differ by no more than the noise.

    Args:
        metrics: The content of `metrics.json`, with the ratio and its interval as far as they were measured.
        before: Milliseconds of the original.
        after: Milliseconds of the compressed model.
    """
    faster = ratio(metrics, "latency", before, after)
    if faster is None or faster <= 0:
        return UNKNOWN
    return format_speed(faster, *_latency_interval(metrics))


def format_speed(faster: float, low: float | None, high: float | None) -> str:
    """Write a ratio of times with its interval: `1.70× faster`, `1.25× slower` or `unchanged`."""
    return UNCHANGED if is_unchanged(faster, low, high) else format_ratio(faster, "faster", "slower")


def latency_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph on the conditions and the uncertainty of the latency."""
    onnx = metrics.get("onnx") or {}
    parts = [f"Latency is the median {_CLOCKS.get(str(onnx.get('clock')), 'time')}"]
    batch, threads = number(metrics, "onnx", "batch"), number(metrics, "onnx", "threads")
    if batch:
        parts.append(f"per batch of {batch:.0f}")
    if threads:
        parts.append(f"on {counted(int(threads), 'thread')}")
    sentences = [" ".join(parts)]
    low, high = _latency_interval(metrics)
    if low is not None and high is not None:
        sentences.append(
            f"The original takes {low:.2f} to {high:.2f} times as long (95{_SPACE}% interval of the ratio of "
            "their times)"
        )
    sentences += filter(None, [rival_note(metrics)])
    if onnx.get("busy"):
        sentences.append(f"The machine was busy: {onnx['busy']}")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def rival_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph on the dense network in 8-bit integers, which needs no compression or training."""
    accuracy, faster = (number(metrics, "dense_int8", key) for key in ("accuracy", "latency_ratio"))
    if accuracy is None or faster is None:
        return ""
    speed = format_speed(faster, *_latency_interval(metrics, "dense_int8"))
    return f"For comparison, the dense network in 8-bit integers: {format_accuracy(accuracy)}, {speed}"


def _latency_interval(metrics: Mapping[str, Any], section: str = "onnx") -> tuple[float | None, float | None]:
    return number(metrics, section, "latency_ratio_low"), number(metrics, section, "latency_ratio_high")
