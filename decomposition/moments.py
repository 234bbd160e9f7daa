"""Second moments of a layer's inputs: all that fitting to the data needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from decomposition.cost import evaluation_mode
from decomposition.errors import DecompositionError
from decomposition.layers import DecomposableModule, LayerSpec
from decomposition.metric import Metric, RowFactor, is_finite, worth_factoring
from decomposition.patches import sample_patches

PATCHES_PER_LAYER = 65_536


@dataclass(frozen=True)
class InputMoments:
    """Moments of a layer's input patches x, float64, D = in * kernel.

    Attributes:
        mean: E[x], shape (D,).
        covariance: E[(x - mean)(x - mean)'], shape (D, D); as rows when there were few patches.
        count: Patches they were estimated from.
    """

    mean: torch.Tensor
    covariance: Metric
    count: int

    @property
    def second_moment(self) -> Metric:
        """E[x x'], shape (D, D)."""
        if isinstance(self.covariance, RowFactor):
            return RowFactor(torch.cat([self.covariance.rows, self.mean[None]]))
        return self.covariance + torch.outer(self.mean, self.mean)


class MomentAccumulator:
    """Sums of patches and their products, in float64; the patches themselves while they are few."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = torch.zeros(0)
        self._rows: list[torch.Tensor] = []
        self._products: torch.Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return self._count == 0

    def add(self, patches: torch.Tensor) -> None:
        """Add patches (n, D)."""
        if self._count == 0:
            self._sum = torch.zeros(patches.shape[1], dtype=torch.float64)
        patches = patches.float()
        self._sum += patches.sum(0).double().cpu()
        self._count += patches.shape[0]
        if self._products is None:
            self._rows.append(patches.cpu())
            if worth_factoring(self._count, patches.shape[1]):
                return
            patches, self._rows = torch.cat(self._rows), []
            self._products = torch.zeros(patches.shape[1], patches.shape[1], dtype=torch.float64)
        self._products += (patches.T @ patches).double().cpu()

    def moments(self) -> InputMoments:
        """Return the moments of everything added."""
        mean = self._sum / self._count
        if self._products is None:
            centred = (torch.cat(self._rows).double() - mean) / self._count**0.5
            return InputMoments(mean, RowFactor(centred), self._count)
        second = self._products / self._count
        return InputMoments(mean, second - torch.outer(mean, mean), self._count)


def calibration_batches(calibration: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a calibration set as a list of batches.

    Raises:
        DecompositionError: If it holds anything but tensors, or inputs of different shapes.
    """
    batches = [calibration] if isinstance(calibration, torch.Tensor) else list(calibration)
    for batch in batches:
        if not isinstance(batch, torch.Tensor):
            raise DecompositionError(
                f"the calibration set holds a {type(batch).__name__}; pass model inputs alone, as one tensor "
                "(N, ...) or as batches of them, such as [x for x, _ in loader]"
            )
        if batch.shape[1:] != batches[0].shape[1:]:
            raise DecompositionError(
                f"the calibration set holds inputs of the shapes {tuple(batches[0].shape[1:])} and "
                f"{tuple(batch.shape[1:])}; pass inputs of one shape, at which costs are counted too"
            )
    return batches


def check_images(images: torch.Tensor) -> None:
    """Refuse calibration inputs that cannot calibrate.

    Raises:
        DecompositionError: If there are none or one holds NaN or an infinite value.
    """
    if images.ndim < 2 or images.shape[0] == 0:
        raise DecompositionError(
            f"the calibration set is empty (shape {tuple(images.shape)}); pass a few hundred model inputs"
        )
    if not bool(torch.isfinite(images).all()):
        raise DecompositionError(
            "the calibration set holds NaN or infinite values; check how it is normalised"
        )


def collect_moments(
    model: nn.Module,
    specs: Sequence[LayerSpec],
    calibration: Iterable[torch.Tensor],
    *,
    max_patches: int = PATCHES_PER_LAYER,
    seed: int = 0,
) -> dict[str, InputMoments]:
    """Estimate the moments of every layer's input patches in one pass over the calibration set.

    Patches are drawn at random positions, an equal number a batch, and only sums are kept, so memory does
    not grow with the number of inputs.

    Args:
        model: The dense network; left as it was.
        specs: Layers to watch.
        calibration: Batches of model inputs, or one tensor of them.
        max_patches: Patches a layer at most, all batches together; several times in * kernel of them are
            needed for a well-determined moment matrix.
        seed: Seed of the patch positions.

    Returns:
        Moments by layer name.

    Raises:
        DecompositionError: If the calibration set is empty, not finite or nothing that the model takes, or a
            layer's input is not finite or never arrives.
    """
    batches = calibration_batches(calibration)
    check_images(torch.cat([batch[:1] for batch in batches]) if batches else torch.empty(0))
    modules = dict(model.named_modules())
    accumulators = {spec.name: MomentAccumulator() for spec in specs}
    generator = torch.Generator().manual_seed(seed)
    per_batch = max(1, max_patches // len(batches))

    def watch(name: str, module: DecomposableModule, calls: int) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            share = max(1, per_batch // calls)
            accumulators[name].add(sample_patches(module, [inputs[0]], share, generator)[0])

        return module.register_forward_pre_hook(hook)

    handles = [watch(spec.name, modules[spec.name], max(1, len(spec.input_sizes))) for spec in specs]
    try:
        with evaluation_mode(model):
            for batch in batches:
                check_images(batch)
                try:
                    model(batch)
                except (RuntimeError, TypeError) as error:
                    reason = str(error).strip().splitlines()[0]
                    raise DecompositionError(
                        f"the model fails on calibration inputs of shape {tuple(batch.shape)}, {batch.dtype} "
                        f"on {batch.device}: {reason}; pass inputs that it takes"
                    ) from error
    finally:
        for handle in handles:
            handle.remove()
    for name, accumulator in accumulators.items():
        if accumulator.empty:
            raise DecompositionError(
                f"layer {name!r}: none of the calibration inputs reaches it; give inputs that do, or leave "
                "the layer out"
            )
    moments = {name: accumulator.moments() for name, accumulator in accumulators.items()}
    for name, moment in moments.items():
        if not is_finite(moment.covariance):
            raise DecompositionError(
                f"layer {name!r}: its inputs are not finite on the calibration set; check weights and inputs"
            )
    return moments
