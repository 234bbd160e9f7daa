"""Score the units of channel groups without training (criteria).

A criterion takes the model, the groups, calibration inputs and a random generator, and returns for each
group's name one score per unit, shape (units,), higher is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pruning.channel_walk import channel_axis
from pruning.copies import fresh_input, plain_network
from pruning.errors import PruningError
from pruning.groups import ChannelGroup
from pruning.registry import register_pruner

ReaderHook = Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...] | None]
Scores = dict[str, torch.Tensor]
Criterion = Callable[[nn.Module, Sequence[ChannelGroup], torch.Tensor | None, torch.Generator | None], Scores]


@register_pruner("first_k", "remove the first k channels of every layer")
def first_k(model: nn.Module, groups: Sequence[ChannelGroup], *_: object) -> Scores:
    """Score units by their number, so that the first ones go first."""
    return {group.name: torch.arange(group.units, dtype=torch.float32) for group in groups}


@register_pruner("random", "remove random channels of every layer")
def random(
    model: nn.Module,
    groups: Sequence[ChannelGroup],
    calibration: torch.Tensor | None,
    generator: torch.Generator | None,
) -> Scores:
    """Score units at random, uniform on [0, 1), from `generator` (torch's default one if None)."""
    return {group.name: torch.rand(group.units, generator=generator, dtype=torch.float32) for group in groups}


@register_pruner("magnitude", "remove the filters with the smallest L1 norm")
def magnitude(model: nn.Module, groups: Sequence[ChannelGroup], *_: object) -> Scores:
    """Score units by the L1 norm of their filters (Li et al. 2017), relative to the mean in each layer."""
    return {group.name: _mean_norms(model, group) for group in groups}


@register_pruner("apoz", "remove the channels with the largest share of zero activations")
def apoz(
    model: nn.Module, groups: Sequence[ChannelGroup], calibration: torch.Tensor | None, *_: object
) -> Scores:
    """Score units by their share of activations, as read, that are not zero (Hu et al. 2016, eq. 1)."""
    if calibration is None or len(calibration) == 0:
        raise PruningError(
            "apoz counts zero activations and needs calibration inputs; give a batch of images"
        )
    read: dict[str, torch.Tensor] = {}

    def count(name: str) -> ReaderHook:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            features = inputs[0].movedim(channel_axis(module), 0).flatten(1)
            read[name] = (features != 0).float().mean(1).cpu()

        return hook

    readers = {name for group in groups for name in group.readers}
    with observed(model, {name: count(name) for name in readers}), torch.no_grad():
        plain_network(model)(fresh_input(calibration))
    return {
        group.name: _mean_by_unit(group.units, [(units, read[name]) for name, units in group.readers.items()])
        for group in groups
    }


@contextmanager
def observed(model: nn.Module, hooks: Mapping[str, ReaderHook]) -> Iterator[None]:
    """Put `model` into evaluation mode with hooks on the inputs of some layers, and restore it afterwards."""
    model = plain_network(model)
    modes = {module: module.training for module in model.modules()}
    handles = [model.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
    model.eval()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training


def _mean_norms(model: nn.Module, group: ChannelGroup) -> torch.Tensor:
    rows: list[tuple[tuple[int, ...], torch.Tensor]] = []
    network = plain_network(model)
    for name, units in group.layers.items():
        weight = network.get_submodule(name).weight
        if not isinstance(weight, torch.Tensor):
            raise PruningError(f"layer {name!r} has no weight to measure")
        norms = weight.detach().flatten(1).abs().sum(1).float().cpu()
        rows.append((units, norms / norms.mean().clamp_min(torch.finfo(torch.float32).tiny)))
    return _mean_by_unit(group.units, rows)


def _mean_by_unit(count: int, rows: list[tuple[tuple[int, ...], torch.Tensor]]) -> torch.Tensor:
    """Average values given per channel over the channels of each unit; a unit of -1 is another group's."""
    total, seen = torch.zeros(2, count + 1, dtype=torch.float32)
    for units, values in rows:
        # Unit -1 maps to an extra last place, which collects the channels of other groups and is dropped.
        index = torch.tensor(units) % (count + 1)
        total.index_add_(0, index, values)
        seen.index_add_(0, index, torch.ones_like(values))
    return (total / seen.clamp_min(1))[:count]


# Ridge, as a share of the channels' mean variance: keeps the covariance invertible.
_RIDGE = 1e-3
# Inputs in a batch, and numbers in them: a backward pass holds all activations of its batch.
_BATCH = 64
_ELEMENTS = 2**20


@register_pruner(
    "reconstruction",
    "remove what the other channels make up for, as far as the network's output tells",
    scope="per_cost",
)
def reconstruction(
    model: nn.Module,
    groups: Sequence[ChannelGroup],
    calibration: torch.Tensor | None,
    generator: torch.Generator | None,
) -> Scores:
    """Score units by the change of the network's outputs that their removal adds, in the order of removal.

    The model runs once forward and backward, in evaluation mode, on `calibration` (a batch of its inputs).
    Random directions from `generator` are sent back instead of the gradient of a loss. Errors in a residual
    stream reach the output along all layers that read it and may add up: their sum is multiplied by the
    number of those layers (the bound of Cauchy and Schwarz).

    Raises:
        PruningError: if there are no calibration inputs, or no gradient can be sent back through the model.
    """
    if calibration is None or len(calibration) == 0:
        raise PruningError(
            "reconstruction looks at activations and needs calibration inputs; give a batch of images"
        )
    model = plain_network(model)
    statistics = {
        (group.name, reader): _ReadStatistics(units, channel_axis(model.get_submodule(reader)))
        for group in groups
        for reader, units in group.readers.items()
    }
    _collect(model, statistics, calibration, generator)
    return {
        group.name: _eliminate(
            group, [statistics[group.name, reader] for reader in group.readers], len(calibration)
        )
        for group in groups
    }


class _ReadStatistics:
    """Running moments of a group as one layer reads it; features of one unit count as its positions."""

    def __init__(self, row: Sequence[int], axis: int) -> None:
        self.axis = axis
        positions: dict[int, list[int]] = {}
        for feature, unit in enumerate(row):
            if unit >= 0:
                positions.setdefault(unit, []).append(feature)
        self.units = torch.tensor(list(positions))
        depth = max(len(features) for features in positions.values())
        # Units with fewer features are padded by the index behind the last feature, which reads zeros.
        self.index = torch.tensor(
            [features + [len(row)] * (depth - len(features)) for features in positions.values()]
        ).T
        self.rows, self.centre = 0, torch.zeros(())
        self.sum = torch.zeros(len(positions), dtype=torch.float64)
        self.products = self.gradients = torch.zeros(len(positions), len(positions), dtype=torch.float64)

    def add_values(self, features: torch.Tensor) -> None:
        values = self._by_unit(features)
        if self.rows == 0:
            self.centre = values.mean(0)
        values = values - self.centre  # float32 products of values far from zero would lose the variance
        self.rows += len(values)
        self.sum = self.sum + values.sum(0).double().cpu()
        self.products = self.products + (values.T @ values).double().cpu()

    def add_gradients(self, features: torch.Tensor) -> None:
        values = self._by_unit(features)
        self.gradients = self.gradients + (values.T @ values).double().cpu()

    def _by_unit(self, features: torch.Tensor) -> torch.Tensor:
        """Return features, channels along `axis`, as rows of one value for each unit."""
        rows = features.detach().movedim(self.axis, -1).flatten(0, -2).float()
        rows = torch.cat([rows, rows.new_zeros(len(rows), 1)], 1)
        return rows[:, self.index.to(rows.device)].flatten(0, 1)


def _collect(
    model: nn.Module,
    statistics: dict[tuple[str, str], _ReadStatistics],
    calibration: torch.Tensor,
    generator: torch.Generator | None,
) -> None:
    """Run the model forward and backward and accumulate the statistics of what its layers read."""

    def watch(statistics: list[_ReadStatistics]) -> ReaderHook:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            # Each reader gets its own copy, whose gradient comes back through this reader alone.
            features = inputs[0].clone()
            for reader_statistics in statistics:
                reader_statistics.add_values(features)
                features.register_hook(reader_statistics.add_gradients)
            return (features, *inputs[1:])

        return hook

    by_reader: dict[str, list[_ReadStatistics]] = {}
    for (_, reader), reader_statistics in statistics.items():
        by_reader.setdefault(reader, []).append(reader_statistics)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learnt:  # only gradients of activations are needed
            parameter.requires_grad_(False)
        with observed(
            model, {name: watch(reader_statistics) for name, reader_statistics in by_reader.items()}
        ):
            for batch in calibration.split(max(1, min(_BATCH, _ELEMENTS // calibration[0].numel()))):
                outputs = model(fresh_input(batch.detach().requires_grad_()))
                reached = [y for y in tree_leaves(outputs) if isinstance(y, torch.Tensor) and y.requires_grad]
                if not reached:
                    raise RuntimeError("its output does not depend on its input in a differentiable way")
                directions = [
                    torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y) for y in reached
                ]
                torch.autograd.backward(reached, directions)
    except RuntimeError as error:
        raise PruningError(
            f"no gradient can be sent back through {type(model).__name__} ({str(error).splitlines()[0]}); "
            "choose another pruner"
        ) from error
    finally:
        for parameter in learnt:
            parameter.requires_grad_()


def _eliminate(group: ChannelGroup, reads: Sequence[_ReadStatistics], inputs: int) -> torch.Tensor:
    """Remove the units of a group one by one; return the error that each adds, never less than the last."""
    readers = Counter(unit for read in reads for unit in read.units.tolist())
    factor = torch.tensor([readers[unit] for unit in range(group.units)], dtype=torch.float64)
    parts = [_Elimination(read, inputs, group.units) for read in reads]
    staying = torch.ones(group.units, dtype=torch.bool)
    scores = torch.zeros(group.units, dtype=torch.float64)
    last = scores.new_zeros(())
    for _ in range(group.units):
        added = factor * sum((part.added() for part in parts), start=torch.zeros_like(scores))
        unit = int(added.masked_fill(~staying, float("inf")).argmin())
        # Strictly more than the last one, so that scores keep the order of removal.
        last = torch.maximum(added[unit], torch.nextafter(last, last.new_tensor(float("inf"))))
        scores[unit] = last
        staying[unit] = False
        for part in parts:
            part.remove(unit)
    return scores


class _Elimination:
    """Precision matrix of the units that one layer reads, and M' G M of the combinations M replacing them."""

    def __init__(self, read: _ReadStatistics, inputs: int, units: int) -> None:
        mean = read.sum / read.rows
        covariance = read.products / read.rows - torch.outer(mean, mean)
        # The clamp keeps the ridge positive for units that are constant.
        mean_variance = covariance.diagonal().mean().clamp_min(1e-30)
        identity = torch.eye(len(read.units), dtype=torch.float64)
        self.precision = torch.linalg.inv(covariance + _RIDGE * mean_variance * identity)
        self.sensitivity = read.gradients / inputs
        self.units = units
        self.of_column = read.units
        self.column = {unit: column for column, unit in enumerate(read.units.tolist())}

    def added(self) -> torch.Tensor:
        """Return tr(G E[e e']) that removing each unit would add, shape (units,); 0 for removed ones."""
        variance = 1 / self.precision.diagonal()
        errors = self.sensitivity.diagonal() * variance.nan_to_num(posinf=0.0)
        return torch.zeros(self.units, dtype=torch.float64).index_add_(0, self.of_column, errors)

    def remove(self, unit: int) -> None:
        """Replace a unit by the best combination of the others."""
        column = self.column.get(unit)
        if column is None:
            return
        precision, sensitivity = self.precision[:, column].clone(), self.sensitivity[:, column].clone()
        share = precision / precision[column]
        self.precision -= torch.outer(precision, share)
        self.sensitivity += sensitivity[column] * torch.outer(share, share)
        self.sensitivity -= torch.outer(sensitivity, share) + torch.outer(share, sensitivity)
        for matrix in (self.precision, self.sensitivity):
            matrix[column] = 0
            matrix[:, column] = 0
