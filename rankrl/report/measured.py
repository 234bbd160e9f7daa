"""Plans that were carried out, scored and timed: what a run's own plan was compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEASURES = {
    "latency": "time",
    "estimated_latency": "time on the device of timing.table, estimated from its layers",
    "bytes": "bytes",
    "macs": "multiply-accumulates",
    "params": "parameters",
}
_COLUMNS = ["Plan", "Loss of score", "Expected loss", "Cost", "Expected cost"]


def measured_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of measured plans as text, for the terminal and the page.

    Args:
        metrics: The content of `metrics.json`.

    Returns:
        The column titles, and one row for each plan, the cheapest first; no rows where none was measured.
        Costs are shares of the original's; the expected one is the sum of the layers' costs, the expected
        loss what the plans measured before let expect.
    """
    rows = [
        [
            str(plan["name"]) + (" (taken)" if plan["taken"] else ""),
            f"{plan['loss']:.4f}",
            "–" if plan.get("predicted_loss") is None else f"{plan['predicted_loss']:.4f}",
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
    if any(plan.get("predicted_loss") is not None for plan in plans):
        note += " What it was expected to lose is known from the plans that were measured before it."
    if taken == "all dense":
        return f"{note} Nothing cheaper loses as little: the network is handed back as it was."
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
        f"estimated {estimate['share']:.3f} of the original's. Times of files are of this machine."
    )


def _plans(metrics: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((metrics.get("search") or {}).get("measured") or ())
