"""The files of a run in several runtimes, and which file is fastest in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.report.stages import (
    UNKNOWN,
    format_accuracy,
    format_latency,
    format_speed,
    number,
)

_FILES = {
    "baseline_latency": "the dense network",
    "latency": "the exported file",
    "dense_int8_latency": "the dense network in 8-bit integers",
}
_COLUMNS = ["Runtime", "Dense", "Exported", "Change", "Dense int8", "Difference"]


def runtime_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of runtimes as text, for the terminal and the page.

    Args:
        metrics: The content of `metrics.json`.

    Returns:
        The column titles, and one row for each runtime; no rows where only one was measured. The change is
        that from the dense network to the exported file, the difference that of its outputs from PyTorch's.

    Raises:
        ReportError: A value is no finite number.
    """
    section = metrics.get("runtimes") or {}
    rows = []
    for name in section:
        dense, exported, integers = (format_latency(number(section, name, f"{key}_ms")) for key in _FILES)
        faster, low, high = (number(section, name, f"latency_ratio{end}") for end in ("", "_low", "_high"))
        change = UNKNOWN if faster is None else format_speed(faster, low, high)
        difference = number(section, name, "max_abs_difference")
        written = UNKNOWN if difference is None else f"{difference:.1e}"
        rows.append([name, dense, exported, change, integers, written])
    return _COLUMNS, rows


def runtime_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph: a sentence for each runtime on its fastest file, and what else to know."""
    section = metrics.get("runtimes") or {}
    sentences = [*_speeds(section), *_classes(section)]
    clocks = {name: entry["clock"] for name, entry in section.items() if "clock" in entry}
    if len(set(clocks.values())) > 1:
        walls = [name for name, clock in clocks.items() if clock == "wall"]
        sentences.append(f"{', '.join(walls)}: timed on the wall, the others in processor time")
    for name, entry in section.items():
        if "failed" in entry:
            sentences.append(f"{name}: not timed, since {entry['failed'].rstrip('.')}")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def _speeds(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the files' times in each runtime compare with those in onnxruntime."""
    for name in section:
        changes = []
        for key, title in _FILES.items():
            ends = ("", "_low", "_high")
            faster, low, high = (number(section, name, f"{key}_runtime_ratio{end}") for end in ends)
            if faster is not None:
                changes.append(f"{title} {format_speed(faster, low, high)}")
        if changes:
            yield f"{name} against {DEFAULT_RUNTIME}: {', '.join(changes)}"


def _classes(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each file in integers whose classes in a runtime are not all those expected."""
    for name in section:
        for key, title, expected in (
            ("agreement", _FILES["latency"], "PyTorch"),
            ("dense_int8_agreement", _FILES["dense_int8_latency"], DEFAULT_RUNTIME),
        ):
            agreement = number(section, name, key)
            if agreement is not None and agreement < 1:
                share = format_accuracy(agreement)
                yield f"{name}: {title} gives the class of {expected} on {share} of the held-out images"
