"""Collect second moments of layer inputs, and re-estimate batch-norm statistics."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decomposition.calibration.calibration_set import CalibrationInputs, checked_batches, refusal
from decomposition.calibration.metric import (
    Metric,
    RowFactor,
    Spread,
    covariance,
    is_finite,
    labels_or_single,
    mean_of,
    most_rows,
    shrunk,
    with_mean,
    worth_factoring,
)
from decomposition.errors import DecompositionError
from decomposition.memory import check_room
from decomposition.network.cost import watching
from decomposition.network.geometry import labels_of_batch, sample_labelled_patches
from decomposition.network.inputs import count_inputs, run_model
from decomposition.network.layers import BatchNorm, DecomposableModule, LayerSpec
from decomposition.network.surgery import unwrapped
from decomposition.public_calls import public_call

log = logging.getLogger(__name__)


def tracked_batch_norms(model: nn.Module) -> list[BatchNorm]:
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]


@public_call()
def reestimate_batch_norm(model: nn.Module, calibration: CalibrationInputs) -> None:
    """Replace the running statistics of every batch norm by those on the calibration set, in place.

    Args:
        model: The compressed model; everything but the statistics stays as it was.
        calibration: Batches of model inputs, or one batch (`decomposition.network`); labels are left away.

    Raises:
        DecompositionError: If there are no inputs, or the model does not take them.
    """
    batches = checked_batches(calibration, model)
    norms = tracked_batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    with watching(model, [norm.register_forward_pre_hook(_weighing(norm)) for norm in norms]):
        for norm in norms:
            norm.reset_running_stats()
            norm.training = True
        try:
            for batch in batches:
                run_model(model, batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


def _weighing(norm: BatchNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a hook that averages a batch norm's statistics over batches, weighted by their sizes."""
    seen = 0

    def weigh(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        count = len(inputs[0])
        seen += count
        norm.momentum = count / seen

    return weigh


PATCHES_PER_LAYER = 65_536


UNREACHED = "none of the calibration inputs reaches it"
"""Why a layer without moments stays as it is."""


def warn_unreached(names: Sequence[str]) -> None:
    """Log which layers stay dense because no calibration input reaches them."""
    if names:
        log.warning(
            "%s: none of the calibration inputs gets there, so these layers stay dense; give inputs that "
            "exercise them",
            ", ".join(names),
        )


@dataclass(frozen=True)
class InputMoments:
    """Moments of a layer's input patches x, float64, D = in * kernel.

    Attributes:
        mean: E[x], shape (D,).
        covariance: E[(x - mean)(x - mean)'], shape (D, D); as rows when there were few patches.
        count: Patches they were estimated from.
        shrinkage: How much of the covariance is chance, 0 to 1 (`decomposition.calibration.metric`).
    """

    mean: torch.Tensor
    covariance: Metric
    count: int
    shrinkage: float = 0.0

    @classmethod
    def even(cls, width: int) -> InputMoments:
        """Return the moments of uncorrelated inputs of variance 1, in which errors of weights count alike."""
        nothing = torch.zeros(0, width, dtype=torch.float64)  # the matrix is too large for wide layers
        return cls(torch.zeros(width, dtype=torch.float64), RowFactor(nothing, 1.0), width + 1)

    @property
    def second_moment(self) -> Metric:
        """E[x x'], shape (D, D)."""
        return with_mean(self.covariance, self.mean)

    def metric(self, *, centred: bool) -> Metric:
        """Return the moments to fit in: what the data does not determine is shrunk towards the identity.

        A single patch has no spread, so all directions get its power.

        Args:
            centred: Around the mean.
        """
        if self.count == 1:
            return shrunk(self.second_moment, 1.0)
        covariance = shrunk(self.covariance, self.shrinkage) if self.shrinkage else self.covariance
        return covariance if centred else with_mean(covariance, self.mean)


def settled(moments: dict[str, InputMoments]) -> dict[str, InputMoments]:
    """Shrink moments once, so that fits in them need no second copy of the matrices."""
    shrunken = {}
    for name in list(moments):
        each = moments.pop(name)
        if each.count > 1:
            each = InputMoments(each.mean, each.metric(centred=True), each.count)
        shrunken[name] = each
    return shrunken


class MomentAccumulator:
    """Running sums of patches and their products, float64, centred on the first batch; raw patches if few."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = torch.zeros(0)
        self._centre = torch.zeros(0)
        self._rows: list[torch.Tensor] = []
        self._products: torch.Tensor | None = None
        self._spread = Spread()

    @property
    def empty(self) -> bool:
        return self._count == 0

    def add(self, patches: torch.Tensor, labels: torch.Tensor) -> None:
        """Add patches (n, D) and which input each is from (n,), integers from 0."""
        patches = patches.float()
        if self._count == 0:
            self._sum = torch.zeros(patches.shape[1], dtype=torch.float64)
            self._centre = patches.mean(0)  # any centre near the mean prevents cancellation
        self._spread.add(patches, labels, self._centre)
        self._sum += mean_of(patches) * len(patches)
        self._count += patches.shape[0]
        if self._products is None:
            self._rows.append(patches.cpu())
            if worth_factoring(self._count, patches.shape[1]):
                return
            patches, self._rows = torch.cat(self._rows), []
            self._products = torch.zeros(patches.shape[1], patches.shape[1], dtype=torch.float64)
        self._products += covariance(patches, self._centre).mul_(len(patches))

    def moments(self) -> InputMoments:
        mean = self._sum / self._count
        matrix: Metric
        if self._products is None:
            rows = torch.cat(self._rows).double()
            matrix = RowFactor(rows.sub_(mean).div_(self._count**0.5))
        else:
            offset = mean - self._centre.double().cpu()
            matrix = (self._products / self._count).addr_(offset, offset, alpha=-1)
        return InputMoments(mean, matrix, self._count, self._spread.shrinkage(matrix))


def fit_sizes(spec: LayerSpec, inputs: int) -> tuple[int, int, int]:
    """Return a layer's outputs, columns and patches, for `decomposition.memory.without_room`."""
    columns = math.prod(spec.weight_shape[1:])
    patches = min(PATCHES_PER_LAYER, inputs * spec.output_positions)
    return spec.out_channels, columns, most_rows(columns, patches)


def check_memory(sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse to collect moments that do not fit into memory."""
    numbers = [columns * min(columns, most_rows(columns, patches)) for columns, patches in sizes]
    check_room(
        8 * (sum(numbers) + 2 * max(numbers, default=0)),
        f"second moments of the inputs of {len(sizes)} layers",
        "leave wide layers as they are (skip), give fewer inputs, or take a machine with more memory",
    )


@public_call()
def collect_moments(
    model: nn.Module,
    specs: Sequence[LayerSpec],
    calibration: CalibrationInputs,
    *,
    max_patches: int = PATCHES_PER_LAYER,
    seed: int = 0,
    unreached: list[str] | None = None,
) -> dict[str, InputMoments]:
    """Estimate the moments of every layer's input patches in one pass over the calibration set.

    Patches are drawn at random positions, an equal number a batch, and only sums are kept, so memory does
    not grow with the number of inputs.

    Args:
        model: The dense network; left as it was.
        specs: Layers to watch.
        calibration: Batches of model inputs, or one batch (`decomposition.network`); labels are left away.
        max_patches: Patches a layer at most, all batches together; several times in * kernel of them are
            needed for a well-determined moment matrix. Of layers with more than 8,192 inputs, kernel
            included, so many as hold 67 million numbers.
        seed: Seed of the patch positions.
        unreached: Takes the names of layers that no input reaches, or with nothing in it, which have no
            moments then; None refuses them.

    Returns:
        Moments by layer name.

    Raises:
        DecompositionError: If the calibration set is empty, not finite or nothing that the model takes, or a
            layer's input is not finite or never arrives, or there is not enough memory.
    """
    model = unwrapped(model)
    batches = checked_batches(calibration, model, [spec.name for spec in specs])
    modules = dict(model.named_modules())
    accumulators = {spec.name: MomentAccumulator() for spec in specs}
    generator = torch.Generator().manual_seed(seed)
    batch, total = batches[0], sum(map(count_inputs, batches))
    check_memory(
        [
            (math.prod(spec.weight_shape[1:]), min(max_patches, total * spec.output_positions))
            for spec in specs
        ]
    )

    def watch(name: str, module: DecomposableModule, calls: int) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].numel() == 0:  # such as an expert that no input is routed to, or an empty cache
                return
            most = most_rows(module.weight[0].numel(), max_patches)
            share = max(1, most // len(batches) // calls)
            (patches,), labels = sample_labelled_patches(module, [inputs[0]], share, generator)
            labels = labels_of_batch(labels, len(inputs[0]), count_inputs(batch))
            accumulators[name].add(patches, labels_or_single(labels, total))

        return module.register_forward_pre_hook(hook)

    handles = [watch(spec.name, modules[spec.name], max(1, len(spec.input_sizes))) for spec in specs]
    with watching(model, handles):
        for batch in batches:
            try:
                run_model(model, batch)
            except (RuntimeError, TypeError, IndexError) as error:
                raise refusal(model, batch, error) from error
    for name in [name for name, accumulator in accumulators.items() if accumulator.empty]:
        if unreached is None:
            raise DecompositionError(
                f"layer {name!r}: {UNREACHED}; give inputs that do, or leave the layer out"
            )
        unreached.append(name)
        del accumulators[name]
    # Each accumulator is free before the next one's matrix is made.
    moments = {name: accumulators.pop(name).moments() for name in list(accumulators)}
    for name, moment in moments.items():
        if not is_finite(moment.covariance):
            raise DecompositionError(
                f"layer {name!r}: its inputs are not finite on the calibration set; check weights and inputs"
            )
    return moments
