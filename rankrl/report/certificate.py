"""What a run's numbers say of the loss of score, and whether it is certified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankrl.report.stages import number


def certificate_note(metrics: Mapping[str, Any]) -> str:
    """Return what is lost with its interval, and what that certifies; empty where the numbers do not say."""
    loss, low, high = (number(metrics, "certificate", key) for key in ("loss", "low", "high"))
    if loss is None or low is None or high is None:
        reason = metrics.get("uncertified")
        return f"Nothing certifies its loss: {reason}." if reason else ""
    certificate = metrics["certificate"]
    unit, inputs = certificate["unit"], f"{certificate['inputs']:,} {certificate['what']}"
    lost = (
        f"loses {_amount(loss, unit)} of {unit}" if loss >= 0 else f"gains {_amount(-loss, unit)} of {unit}"
    )
    ends = " to ".join(_amount(end, unit, named=False) for end in (low, high))
    return f"On {inputs} it {lost} (95 % interval of the loss: {ends}){_verdict(metrics)}."


def certificate_card(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the headline number of the loss: name, value and note; none where the numbers do not say."""
    loss, low, high = (number(metrics, "certificate", key) for key in ("loss", "low", "high"))
    if loss is None or low is None or high is None:
        return []
    certificate = metrics["certificate"]
    unit, drop = certificate["unit"], number(metrics, "certificate", "drop")
    ends = " to ".join(_amount(end, unit, named=False) for end in (low, high))
    note = f"95 % interval of the loss on {certificate['inputs']:,} {certificate['what']}: {ends}"
    if drop is not None:
        certified = "certified" if certificate["certified"] else "not certified"
        note += f"; at most {_amount(drop, unit)} is {certified}"
    return [(f"Loss of {unit}", _amount(loss, unit), note)]


def _verdict(metrics: Mapping[str, Any]) -> str:
    """Return what the interval says of the loss that was accepted."""
    certificate, drop = metrics["certificate"], number(metrics, "certificate", "drop")
    seen = "" if certificate["independent"] else ", by which the plan may have been chosen, too"
    if drop is None:
        return seen
    accepted = f"at most {_amount(drop, certificate['unit'])}"
    needed = number(metrics, "certificate", "needed")
    if certificate["certified"]:
        return f": a loss of {accepted} is certified"
    if certificate["loss"] > drop:
        return f"{seen}: more than the {_amount(drop, certificate['unit'])} that may be lost"
    if needed is None:
        return f"{seen}: no number of inputs certifies {accepted} at this loss"
    if needed <= certificate["inputs"]:
        return f"{seen}: {accepted} is not certified"
    return f"{seen}: {accepted} is not certified, which would take about {needed:,.0f} inputs at this loss"


def _amount(value: float, unit: str, *, named: bool = True) -> str:
    """Write a difference of scores: in points where they are shares."""
    points = f"{value:.3g}" if unit == "score" else f"{100 * value:.2f}"
    text = "0" if float(points) == 0 else points.replace("-", "−")
    return f"{text} points" if named and unit != "score" else text
