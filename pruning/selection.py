"""Select the channels to keep from scores: a share of every group, or as many as a cost allows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from pruning.copies import public_call
from pruning.errors import PruningError
from pruning.groups import ChannelGroup, KeptChannels, groups_of_walk
from pruning.removal import cut, remove_channels, validate_kept
from pruning.tracing import walk_channels

Scope = Literal["uniform", "global", "per_cost"]
"""Keep the same share of every group, or rank all units together: by score, or by score per cost saved."""
Cost = Callable[[nn.Module], float]
"""The cost of a network, such as its parameters or its MACs; it must shrink as channels go."""


@public_call
def keep_share(
    groups: Sequence[ChannelGroup],
    scores: Mapping[str, torch.Tensor],
    share: float,
    scope: Literal["uniform", "global"] = "uniform",
    multiple: int = 1,
) -> KeptChannels:
    """Keep the best units.

    Args:
        groups: the groups to prune.
        scores: for each group's name the scores of its units, shape (units,), higher is better.
        share: of the units to keep, in [0, 1]; every layer keeps a channel even at 0.
        scope: take the share of every group (`uniform`), or of all units ranked together (`global`).
        multiple: what is left of a layer that loses channels is rounded to the nearest multiple of it, and to
            at least one.

    Raises:
        PruningError: if the share, the scope or the multiple is not allowed, or a score is missing, misshapen
            or not a number.
    """
    if not 0 <= share <= 1:
        raise PruningError(f"the share of kept units must lie in [0, 1], got {share}")
    if scope not in ("uniform", "global"):
        raise PruningError(f"scope is {scope!r}; choose uniform or global")
    if multiple < 1:
        raise PruningError(f"channels are kept in multiples of at least 1, got {multiple}")
    rows = [_checked(group, scores) for group in groups]
    if scope == "uniform":
        opened = [_best(row, round(share * len(row))) for row in rows]
    else:
        together = torch.cat(rows)
        opened = list(_best(together, round(share * len(together))).split([len(row) for row in rows]))
    kept: KeptChannels = {}
    for group, units, row in zip(groups, opened, rows, strict=True):
        kept.update(group.kept(group.spare(_rounded(group, units, row, multiple), row)))
    return kept


@public_call
def keep_within(
    model: nn.Module,
    example_input: torch.Tensor,
    groups: Sequence[ChannelGroup],
    scores: Mapping[str, torch.Tensor],
    cost: Cost,
    fraction: float,
    scope: Scope = "uniform",
    multiple: int = 1,
) -> KeptChannels:
    """Keep as many of the best units as a cost allows.

    Args:
        model: the network to prune, left as it is.
        example_input: a batch that it accepts, channels on axis 1.
        groups: the groups to prune.
        scores: for each group's name the scores of its units, shape (units,), higher is better.
        cost: the cost of a network.
        fraction: of the model's cost that may remain, in (0, 1].
        scope: see `keep_share`; `per_cost` ranks all units together by score for each bit of cost that they
            save, which is for scores that are errors.
        multiple: see `keep_share`.

    Raises:
        PruningError: if the target cannot be reached, with the smallest fraction that can.
    """
    if not 0 < fraction <= 1:
        raise PruningError(f"the fraction of the cost to keep must lie in (0, 1], got {fraction}")
    walk = walk_channels(model, example_input)
    every = groups_of_walk(walk)
    whole = cost(model)
    allowed = fraction * whole

    def cost_of(kept: KeptChannels) -> float:
        return cost(cut(model, walk, validate_kept(kept, every)))

    if scope == "per_cost":
        scores = {
            group.name: _checked(group, scores) / _saved_by_unit(group, cost_of, whole) for group in groups
        }

    def kept_at(share: float) -> tuple[KeptChannels, float]:
        kept = keep_share(groups, scores, share, "uniform" if scope == "uniform" else "global", multiple)
        return kept, cost_of(kept)

    best, spent = kept_at(1.0)
    if spent <= allowed:
        return best
    _require(cost_of(_fewest(groups, multiple)) / whole, groups, fraction, multiple)
    best, _ = kept_at(0.0)
    low, high = 0.0, 1.0
    for _ in range(math.ceil(math.log2(sum(group.units for group in groups))) + 1):
        middle = (low + high) / 2
        kept, spent = kept_at(middle)
        if spent <= allowed:
            low, best = middle, kept
        else:
            high = middle
    return best


def require_reachable(
    model: nn.Module,
    example_input: torch.Tensor,
    groups: Sequence[ChannelGroup],
    cost: Cost,
    fraction: float,
    multiple: int = 1,
) -> None:
    """Check that a network with the fewest channels per layer costs no more than `fraction` of it."""
    smallest = cost(remove_channels(model, _fewest(groups, multiple), example_input))
    _require(smallest / cost(model), groups, fraction, multiple)


def _fewest(groups: Sequence[ChannelGroup], multiple: int) -> KeptChannels:
    """Return the channels to keep for the smallest network: the fewest for each layer."""
    scores = {group.name: torch.zeros(group.units, dtype=torch.float32) for group in groups}
    return keep_share(groups, scores, 0.0, multiple=multiple)


def _require(smallest: float, groups: Sequence[ChannelGroup], fraction: float, multiple: int) -> None:
    """Check that the smallest fraction of the cost that can be reached is no larger than `fraction`."""
    if smallest > fraction:
        channels = "one channel" if multiple == 1 else f"{multiple} channels"
        raise PruningError(
            f"a cost of {fraction:.3g} of the network's cannot be reached: with {channels} per layer in "
            f"{', '.join(group.name for group in groups)} it is still {smallest:.3g}; "
            "prune more layers or raise the target"
        )


def _saved_by_unit(
    group: ChannelGroup, cost_of: Callable[[KeptChannels], float], whole: float
) -> torch.Tensor:
    """Return the cost that removing each unit saves, shape (units,): the mean over a quarter of its kind."""
    saved = torch.zeros(group.units, dtype=torch.float64)
    order = torch.arange(group.units)
    for alike in _alike(group):
        units = torch.ones(group.units, dtype=torch.bool)
        units[alike[: max(1, len(alike) // 4)]] = False
        units = group.spare(units, order)
        gone = max(1, group.units - int(units.sum()))
        # Positive: scores are divided by it.
        saved[alike] = max((whole - cost_of(group.kept(units))) / gone, 1e-30)
    return saved


def _alike(group: ChannelGroup) -> list[list[int]]:
    """Partition the units of a group by the layers that make them: a residual stream may widen."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    counts = [Counter(row) for row in group.layers.values()]
    for unit in range(group.units):
        kinds.setdefault(tuple(count[unit] for count in counts), []).append(unit)
    return list(kinds.values())


def _rounded(group: ChannelGroup, opened: torch.Tensor, scores: torch.Tensor, multiple: int) -> torch.Tensor:
    """Open or close borderline units, so that a multiple of each kind remains, or all of it."""
    if multiple == 1:
        return opened
    rounded = opened.clone()
    for alike in _alike(group):
        members = torch.tensor(alike)
        count = int(opened[members].sum())
        if count == len(alike):
            continue
        indispensable = any(set(row) <= set(alike) for row in group.layers.values())
        count = max(int(indispensable) * multiple, multiple * math.floor(count / multiple + 0.5))
        rounded[members] = _best(scores[members], min(count, len(alike)))
    return rounded


def _checked(group: ChannelGroup, scores: Mapping[str, torch.Tensor]) -> torch.Tensor:
    row = scores.get(group.name)
    if row is None or row.shape != (group.units,) or row.isnan().any():
        got = (
            "none"
            if row is None
            else f"shape {tuple(row.shape)}, {int(row.isnan().sum())} of them not numbers"
        )
        raise PruningError(f"group {group.name!r} needs {group.units} scores, got {got}")
    return row.detach().cpu()


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    units = torch.zeros(len(scores), dtype=torch.bool)
    units[scores.argsort(descending=True, stable=True)[:count]] = True
    return units
