"""Draw the plan along the network: a block for every layer, with its operations as a tooltip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankrl.report.figures import LEFT_DENSE, ONLY_ROUNDED, REMOVED, layer_kind, method_styles
from rankrl.report.run_folder import LayerRow, layer_formats
from rankrl.report.stages import format_count, format_large, format_share

_STEP, _WIDTH = 20.0, 14.0
_HEIGHT, _GAP = 84.0, 16.0
_LEAST = 5.0  # so that the smallest layers are seen


@dataclass(frozen=True)
class Block:
    """A layer: the outline shows its original size, the filling the share that is kept."""

    x: float
    y: float
    width: float
    height: float
    filled_y: float
    filled: float
    colour: str
    title: str


@dataclass(frozen=True)
class NetworkDrawing:
    """The blocks of all layers, in rows."""

    width: float
    height: float
    blocks: Sequence[Block]
    lines: Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class PlanDrawing:
    """The drawing of a plan, for wide and for narrow windows."""

    wide: NetworkDrawing
    narrow: NetworkDrawing
    legend: Sequence[tuple[str, str]]
    caption: str


def plan_drawing(layers: Sequence[LayerRow]) -> PlanDrawing | None:
    """Draw the layers in forward order; None without layers.

    The height of an outline grows with the fourth root of the layer's parameters, so that the smallest are
    seen next to the largest.
    """
    if not layers:
        return None
    formats = layer_formats(layers)
    mixed = len(formats) > 1
    roles_of = {LEFT_DENSE: "soft", ONLY_ROUNDED: "muted"}
    if mixed:
        roles_of |= {name: role for name, (role, _) in method_styles(formats).items()}
    kinds = [layer_kind(row, mixed=mixed) for row in layers]
    roles = [roles_of.get(kind, "accent") for kind in kinds]
    shown = {kind: role for kind, role in zip(kinds, roles, strict=True) if kind != REMOVED}
    legend = {kind.replace("_", " "): role for kind, role in shown.items()}
    empty = "; an empty one left the network" if REMOVED in kinds else ""
    return PlanDrawing(
        _drawn(layers, roles, fewest=24, most=44),
        _drawn(layers, roles, fewest=12, most=16),
        list(legend.items()),
        "Every layer from the input to the output: the outline is what it had, the filling what is "
        f"left{empty}. Point at a layer for its operations.",
    )


def _drawn(layers: Sequence[LayerRow], roles: Sequence[str], *, fewest: int, most: int) -> NetworkDrawing:
    """Draw up to `most` layers in a row, at least `fewest` blocks wide, so that blocks keep their size."""
    rows = math.ceil(len(layers) / most)
    per_row = math.ceil(len(layers) / rows)
    largest = max(row.params_before for row in layers)
    blocks = []
    for index, (row, role) in enumerate(zip(layers, roles, strict=True)):
        line, column = divmod(index, per_row)
        height = max(_LEAST, _HEIGHT * (row.params_before / largest) ** 0.25)
        filled = height * min(1.0, row.kept)
        middle = line * (_HEIGHT + _GAP) + _HEIGHT / 2
        blocks.append(
            Block(
                round(column * _STEP + (_STEP - _WIDTH) / 2, 1),
                round(middle - height / 2, 1),
                _WIDTH,
                round(height, 1),
                round(middle + height / 2 - filled, 1),
                round(filled, 1),
                role,
                _title(row),
            )
        )
    lines = [
        (0.0, min(per_row, len(layers) - line * per_row) * _STEP, line * (_HEIGHT + _GAP) + _HEIGHT / 2)
        for line in range(rows)
    ]
    return NetworkDrawing(max(per_row, fewest) * _STEP, rows * (_HEIGHT + _GAP) - _GAP, blocks, lines)


def _title(row: LayerRow) -> str:
    """Return the tooltip of a layer: shape, operations and costs, one on each line."""
    facts = [f"{row.name}: {'×'.join(map(str, row.shape))}"]
    if row.ranks:
        facts.append(f"{row.format.replace('_', ' ') or 'ranks'} {', '.join(map(str, row.ranks))}")
    if row.channels is not None:
        facts.append("{} of {} channels".format(*row.channels))
    if row.precision:
        facts.append(row.precision)
    facts.append(
        f"{format_share(row.kept)} of the parameters: {format_count(row.params_after)} of "
        f"{format_count(row.params_before)}"
    )
    facts.append(f"MACs: {format_large(row.macs_after)} of {format_large(row.macs_before)}")
    if row.error is not None:
        facts.append(f"relative error {row.error:.3f}")
    if row.reason:
        facts.append(row.reason)
    return "\n".join(facts)
