"""The table of layers by what their compression loses and saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankrl.report.stages import UNKNOWN, format_large, format_share

LAYER_COSTS_NOTE = (
    "Layers by what their compression loses: shares of the sum of the losses at the network's output, as the "
    "search estimated them. A layer that loses much and saves little is one to leave as it is: "
    "decomposition.skip=[NAME]."
)


def layer_cost_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table as text; no rows where the numbers do not tell."""
    layers = metrics.get("layers") or ()
    whole = sum(layer["loss"] for layer in layers) or 1.0
    timed = any(layer["saved_time"] is not None for layer in layers)
    columns = ["Layer", "Loss", "Parameters saved", "MACs saved", *(["Time saved"] if timed else [])]
    rows = [
        [
            layer["name"],
            format_share(layer["loss"] / whole),
            _signed(layer["saved_params"]),
            _signed(layer["saved_macs"]),
            *([_time(layer["saved_time"])] if timed else []),
        ]
        for layer in layers
    ]
    return columns, rows


def _signed(count: int) -> str:
    return format_large(count) if count >= 0 else f"−{format_large(-count)}"


def _time(share: float | None) -> str:
    return UNKNOWN if share is None else format_share(share).replace("-", "−")
