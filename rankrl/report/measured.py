"""Plans that were carried out, scored and timed: what a run's own plan was compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankrl.wording import counted

_MEASURES = {
    "latency": "time",
    "estimated_latency": "time on the device of timing.table, estimated from its layers",
    "bytes": "bytes",
    "macs": "multiply-accumulates",
    "params": "parameters",
}
_COLUMNS = ["Plan", "Loss of score", "Cost", "Expected cost"]


def measured_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of measured plans as text, for the terminal and the page."""
    rows = [
        [
            str(plan["name"]) + (" (taken)" if plan["taken"] else ""),
            f"{plan['loss']:.4f}",
            f"{plan['cost']:.3f}",
            f"{plan['expected_cost']:.3f}",
        ]
        for plan in _plans(metrics)
    ]
    return _COLUMNS, rows


def measured_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph on the plan that was taken; empty where none was measured."""
    plans = _plans(metrics)
    if not plans:
        return ""
    taken = next((plan["name"] for plan in plans if plan["taken"]), None)
    measure = plans[0]["measure"]
    done = "scored" if measure.startswith("estimated") else "measured"
    note = f"Each plan was carried out and {done}; the cost is the {_MEASURES[measure]}."
    if taken == "all dense":
        return f"{note} Nothing cheaper loses as little, so you get the original network."
    if taken is not None:
        note += (
            f" {taken[0].upper()}{taken[1:]} was taken: no other is better in one and as good in the other."
        )
    return note


def estimate_note(metrics: Mapping[str, Any]) -> str:
    """Return a sentence on the time on another device that was searched for; empty where there was none."""
    estimate = (metrics.get("search") or {}).get("estimate")
    if estimate is None:
        return ""
    return (
        f"The plan is for another device: its layers' times there ({estimate['conditions']}) add up to an "
        f"estimated {estimate['share']:.3f} of the original's{_corrected(estimate)}. Times of files are "
        "of this machine."
    )


def device_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of finished networks that were measured on another device; no rows where none was."""
    rows = [
        [
            str(each["title"]) + (" (this plan)" if each["taken"] else ""),
            "" if each["score"] is None else f"{each['score']:.4f}",
            f"{each['milliseconds']:.3g} ms",
            f"{each['share']:.3f}",
        ]
        for each in _finished(metrics)
    ]
    return ["Network", "Score", "Time there", "Of the dense one's"], rows


def device_note(metrics: Mapping[str, Any]) -> str:
    """Return a sentence on where finished networks were measured; empty where none was."""
    if not _finished(metrics):
        return ""
    return (
        f"Measured on the other device ({metrics['search']['estimate']['conditions']}), whole; scores are of "
        "the machine that wrote their kit."
    )


def _corrected(estimate: Mapping[str, Any]) -> str:
    count = len(estimate.get("networks") or ())
    return f", corrected by {counted(count, 'finished network')} measured there" if count else ""


def _finished(metrics: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(((metrics.get("search") or {}).get("estimate") or {}).get("networks") or ())


def _plans(metrics: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((metrics.get("search") or {}).get("measured") or ())
