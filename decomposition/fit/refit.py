"""Refit layers sequentially, each to the inputs it receives in the compressed network."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from decomposition.calibration.calibration_set import checked_batches
from decomposition.calibration.metric import (
    Metric,
    RowFactor,
    cholesky,
    covariance,
    in_parts,
    labels_or_single,
    mean_of,
    most_rows,
    shrinkage,
    shrunk_matrix,
    shrunk_rows,
    trace,
    worth_factoring,
)
from decomposition.calibration.moments import PATCHES_PER_LAYER, tracked_batch_norms
from decomposition.errors import DecompositionError
from decomposition.formats.layers import FactorisedLayer
from decomposition.memory import fit_bytes, shortage
from decomposition.network.cost import evaluation_mode
from decomposition.network.geometry import labels_of_batch, sample_labelled_patches
from decomposition.network.inputs import Inputs, count_inputs, joined, rows, run_model, tensors_in
from decomposition.network.layers import BatchNorm, DecomposableModule, LayerSpec, inspect_layers, weight_of
from decomposition.network.rounding import calibrate_ranges
from decomposition.network.surgery import copied, replace_module, unwrapped
from decomposition.public_calls import public_call

log = logging.getLogger(__name__)

_Replaced = TypeVar("_Replaced", bound=nn.Module)


class StandIn(nn.Module, Generic[_Replaced]):
    """Stands in for a module and forwards its attributes, which the network's own code may read."""

    dense: _Replaced

    def __init__(self, dense: _Replaced) -> None:
        super().__init__()
        self.dense = dense

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("dense"), name)


class RemovedBlock(nn.Module):
    """Runs a block on the first half of the batch and an identity on the second."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.dense = (block.eval(),)  # in a tuple, so that its layers and norms are no submodules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense_input, arriving = x.chunk(2)
        return torch.cat([self.dense[0](dense_input), arriving])


class Substituted(StandIn[nn.Module]):
    """Runs one module on the first half of the batch and another one on the second."""

    def __init__(self, dense: nn.Module, substitute: nn.Module) -> None:
        super().__init__(dense)
        self.substitute = substitute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense, arriving = x.chunk(2)
        return torch.cat([self.dense(dense), self.substitute(arriving)])


class NormPair(StandIn[BatchNorm]):
    """A batch norm whose running mean follows the shift of the compressed half's mean."""

    def __init__(self, norm: BatchNorm) -> None:
        super().__init__(norm)
        self.shift: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise both halves, the second one around its shifted mean."""
        norm = self.dense
        dense, arriving = x.chunk(2)
        if self.shift is None:
            axes = [axis for axis in range(x.ndim) if axis != 1]
            self.shift = arriving.mean(axes) - dense.mean(axes)
        expected, mean = norm(dense), norm.running_mean
        assert mean is not None
        # Call the norm itself: subclasses may do more than normalise.
        norm.running_mean = mean + self.shift
        try:
            moved = norm(arriving)
        finally:
            norm.running_mean = mean
        return torch.cat([expected, moved])

    def finish(self) -> nn.Module:
        if self.shift is not None and self.dense.running_mean is not None:
            self.dense.running_mean += self.shift
        return self.dense


# Least ridge towards the original weight, as a fraction of the inputs' mean power.
RIDGE = 1e-3


def moments_of(patches: torch.Tensor, mean: torch.Tensor) -> Metric:
    """Return the covariance of patches (n, D), float64 on the CPU, as rows where they are few."""
    if not worth_factoring(*patches.shape):
        return covariance(patches, mean)
    return RowFactor((patches.cpu() - mean.double()).mul_(len(patches) ** -0.5))


def target_and_metric(
    weight: torch.Tensor,
    outputs: torch.Tensor,
    arriving: torch.Tensor,
    moments: Metric,
    outputs_mean: torch.Tensor,
    mean: torch.Tensor,
    share: float,
    *,
    centred: bool,
) -> tuple[torch.Tensor, Metric]:
    """Return the target (W C_xy + r W) (C_yy + r I)^-1 and C_yy, from outputs W x and `moments` C_yy."""
    if isinstance(moments, RowFactor):
        return _from_rows(weight, outputs, moments, outputs_mean, mean, share, centred=centred)
    metric = shrunk_matrix(moments, share)
    cross = covariance(arriving, mean, outputs, outputs_mean).T
    cross = (1 - share) * cross + share * moments.diagonal().mean() * weight
    if not centred:
        metric = metric + torch.outer(mean, mean)
        cross = cross + torch.outer(outputs_mean, mean)
    # The clamp keeps the system solvable if all inputs are zero.
    ridge = RIDGE * metric.diagonal().mean().clamp_min(1e-30)
    regularised = metric.clone()
    regularised.diagonal().add_(ridge)
    return torch.cholesky_solve((cross + ridge * weight).T, cholesky(regularised)).T, metric


def _from_rows(
    weight: torch.Tensor,
    outputs: torch.Tensor,
    metric: RowFactor,
    outputs_mean: torch.Tensor,
    mean: torch.Tensor,
    share: float,
    *,
    centred: bool,
) -> tuple[torch.Tensor, RowFactor]:
    """Solve for W + (W X' - W Y') (Y Y' + r I)^-1 Y, in which nothing is as large as C_yy."""
    metric = shrunk_rows(metric, share)
    rows = metric.rows
    expected = ((1 - share) / len(outputs)) ** 0.5 * (outputs.double().cpu() - outputs_mean)
    if not centred:
        rows, expected = torch.cat([rows, mean[None]]), torch.cat([expected, outputs_mean[None]])
        metric = RowFactor(rows, metric.ridge)
    ridge = metric.ridge + max(RIDGE * trace(metric) / rows.shape[1], 1e-30)
    regularised = rows @ rows.T
    regularised.diagonal().add_(ridge)
    change = torch.cholesky_solve(expected - rows @ weight.T, cholesky(regularised))
    return torch.addmm(weight, change.T, rows), metric


# Patches per input that a dense layer needs: its many weights would overfit fewer.
PATCHES_TO_SOLVE = 4
# Patches that a reported error is averaged over: enough for a few digits.
_PATCHES_FOR_ERROR = 16_384
_ADVICE = "use sequential=False (decomposition.sequential=false on the command line)"


@dataclass(frozen=True)
class RefitProblem:
    """The regression problem of a layer: target weight, metric (D, D), number of patches, and start."""

    target: torch.Tensor
    metric: Metric | None
    count: int = 0
    start: Sequence[torch.Tensor] | None = None


# Returns the fitted layer and its weight (out, in, kernel) in float64.
Refit = Callable[[RefitProblem], tuple[nn.Module, torch.Tensor]]


@dataclass(frozen=True)
class Solved:
    """The refit of a layer that stays dense: its weight compensates for the errors before it."""

    layer: DecomposableModule
    inputs: int

    def __call__(self, problem: RefitProblem) -> tuple[nn.Module, torch.Tensor]:
        """Copy the layer and, if there were patches enough, the problem's target into its weight."""
        fitted = copied(self.layer)
        if self.enough(problem.count):
            with torch.no_grad():
                fitted.weight.copy_(problem.target.reshape(fitted.weight.shape))
        return fitted, weight_of(fitted)

    def enough(self, patches: int) -> bool:
        """Tell whether so many patches determine a weight."""
        return patches >= PATCHES_TO_SOLVE * self.inputs


@dataclass(frozen=True)
class Refitted:
    """A refitted layer, the shift of its mean output, and its relative output error."""

    module: nn.Module
    shift: torch.Tensor
    error: float


def refit_to_patches(
    name: str,
    dense: DecomposableModule,
    refit: Refit,
    dense_patches: torch.Tensor,
    arriving: torch.Tensor,
    labels: torch.Tensor | None,
    *,
    mean_absorbed: bool,
) -> Refitted:
    """Fit a layer so that its outputs on arriving patches match the dense layer's on the dense patches."""
    # A single patch determines no moments.
    solvable = refit.enough(len(arriving)) if isinstance(refit, Solved) else len(arriving) > 1
    if solvable and (lack := shortage(fit_bytes(len(dense.weight), arriving.shape[1], len(arriving)))):
        if not isinstance(refit, Solved):
            raise DecompositionError(
                f"layer {name!r}: its fit takes {lack}; leave it dense (skip), give fewer inputs, or take a "
                "machine with more memory"
            )
        log.warning("%s: its fit takes %s, so this dense layer keeps its weight", name, lack)
        solvable = False
    weight = weight_of(dense)
    matrix = weight.flatten(1)
    # In half precision second moments lose definiteness or overflow.
    dense_patches, arriving = (x.float() if x.element_size() < 4 else x for x in (dense_patches, arriving))
    dense_mean, mean = mean_of(dense_patches), mean_of(arriving)
    problem = RefitProblem(weight, None, len(arriving))
    if solvable:
        target, metric = _regression(
            matrix, dense_patches, arriving, dense_mean, mean, labels, centred=mean_absorbed
        )
        problem = RefitProblem(target.reshape_as(weight), metric, len(arriving))
        del target, metric
    some = slice(None, None, max(1, len(arriving) // _PATCHES_FOR_ERROR))
    outputs, shift = dense_patches[some] @ matrix.T.to(dense_patches), matrix @ dense_mean
    del weight, matrix  # before the fit takes as much
    fitted, new_weight = refit(problem)
    del problem
    shift -= new_weight.flatten(1) @ mean
    rest = outputs - arriving[some] @ new_weight.flatten(1).T.to(arriving)
    if mean_absorbed:
        rest -= shift.to(rest)
    # Doubles, in which the clamp is above 0: the error of a layer whose outputs are all 0 is no NaN.
    whole = outputs.square().sum().double().clamp_min(1e-300)
    error = float((rest.square().sum().double() / whole).sqrt())
    return Refitted(fitted, shift, error)


def _regression(
    weight: torch.Tensor,
    dense: torch.Tensor,
    arriving: torch.Tensor,
    dense_mean: torch.Tensor,
    mean: torch.Tensor,
    labels: torch.Tensor | None,
    *,
    centred: bool,
) -> tuple[torch.Tensor, Metric]:
    """Return `target_and_metric` of patches, shrunk if `labels` tell which input each is from."""
    moments = moments_of(arriving, mean)
    share = 0.0 if labels is None else shrinkage(arriving, labels, moments, mean.to(arriving))
    if isinstance(moments, RowFactor):
        outputs = torch.cat([part.double().cpu() @ weight.T for part in in_parts(dense)])
    else:
        outputs = dense @ weight.T.to(dense)
    return target_and_metric(
        weight, outputs, arriving, moments, weight @ dense_mean, mean, share, centred=centred
    )


def absorbs_mean(spec: LayerSpec, correct_batch_norm: bool) -> bool:
    """Tell whether a change of the layer's mean output can be corrected without new parameters."""
    if len(spec.output_sizes) > 1:
        return False
    return spec.bias or (correct_batch_norm and spec.batch_norm is not None)


def refit_in_lockstep(
    model: nn.Module,
    refits: dict[str, Refit],
    images: Inputs,
    *,
    present: Mapping[str, torch.Tensor] | None = None,
    removed: Iterable[str] = (),
    substitutes: Mapping[str, nn.Module] | None = None,
    mean_absorbed: set[str],
    correct_batch_norm: bool,
    max_patches: int,
    seed: int,
    shrink: bool = True,
) -> dict[str, float]:
    """Replace layers of `model` in forward order, each fitted to the inputs that reach it."""
    modules = dict(model.named_modules())
    with evaluation_mode(model):
        expected = run_model(model, rows(images, slice(2)))
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[str, _LayerPair] = {}
    norms: list[NormPair] = []
    for name, refit in refits.items():
        dense: DecomposableModule = modules[name]
        pairs[name] = _LayerPair(
            name,
            dense,
            refit,
            (present or {}).get(name),
            name in mean_absorbed,
            max_patches,
            generator,
            2 * count_inputs(images),
            shrink,
        )
        replace_module(model, dense, pairs[name])
    blocks = [RemovedBlock(modules[name]) for name in removed]
    for block in blocks:
        replace_module(model, block.dense[0], block)
    substituted = [Substituted(modules[name], other) for name, other in (substitutes or {}).items()]
    for stand_in in substituted:
        replace_module(model, stand_in.dense, stand_in)
    if correct_batch_norm:
        for norm in tracked_batch_norms(model):
            norms.append(NormPair(norm))
            replace_module(model, norm, norms[-1])
    try:
        with evaluation_mode(model):
            result = run_model(model, joined([images, images]))
    finally:
        for pair in pairs.values():
            replace_module(model, pair, pair.fitted if pair.fitted is not None else pair.dense)
        for norm_pair in norms:
            replace_module(model, norm_pair, norm_pair.finish())
        for block in blocks:
            replace_module(model, block, nn.Identity())
        for stand_in in substituted:
            replace_module(model, stand_in, stand_in.dense)
    for before, after in zip(tensors_in(expected), tensors_in(result), strict=True):
        if not _begins_with(after, before):
            raise DecompositionError(
                "the model's output for one input changes with the other inputs of the batch, so it cannot "
                f"be refitted layer by layer in one pass; {_ADVICE}"
            )
    return {name: pair.error for name, pair in pairs.items() if pair.fitted is not None}


def _begins_with(outputs: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether the outputs for a batch begin with those expected for its first inputs."""
    if expected.ndim == 0:  # a number for the whole batch, such as an auxiliary loss
        return True
    first = outputs[: len(expected)]
    return first.shape == expected.shape and torch.allclose(first, expected, rtol=1e-2, atol=1e-3)


class _LayerPair(StandIn[DecomposableModule]):
    """Runs the dense layer on the first half of the batch and its replacement on the second."""

    def __init__(
        self,
        name: str,
        dense: DecomposableModule,
        refit: Refit,
        present: torch.Tensor | None,
        mean_absorbed: bool,
        max_patches: int,
        generator: torch.Generator,
        batch: int,
        shrink: bool,
    ) -> None:
        super().__init__(dense)
        self.name = name
        self.refit = refit
        self.present = present
        self.mean_absorbed = mean_absorbed
        self.max_patches = max_patches
        self.generator = generator
        self.batch = batch
        self.shrink = shrink
        self.fitted: nn.Module | None = None
        self.error = float("nan")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) % self.batch:  # multiples are fine: images may be cut into windows
            raise DecompositionError(
                f"layer {self.name!r}: the first axis of its input, shape {tuple(x.shape)}, does not count "
                f"the batch's {self.batch} inputs, so it cannot be refitted in one pass; {_ADVICE}"
            )
        if x.numel() == 0:  # there is nothing to fit to
            return self.dense(x)
        dense_input, arriving = x.chunk(2)
        if self.present is not None:
            behind = 0 if isinstance(self.dense, nn.Linear) else arriving.ndim - 2
            arriving = arriving * self.present.to(arriving).reshape(-1, *[1] * behind)
        if self.fitted is None:
            most = most_rows(self.dense.weight[0].numel(), self.max_patches)
            (dense_patches, patches), labels = sample_labelled_patches(
                self.dense, [dense_input, arriving], most, self.generator
            )
            inputs = self.batch // 2
            labels = labels_or_single(labels_of_batch(labels, len(arriving), inputs), inputs)
            # The network masks values that are not finite (`decomposition.calibration.calibration_set`).
            finite = (dense_patches.isfinite() & patches.isfinite()).all(1)
            dense_patches, patches, labels = dense_patches[finite], patches[finite], labels[finite]
            self.fitted = self._fit(dense_patches, patches, labels)
            del dense_patches, patches  # each may be as large as the weight
            calibrate_ranges(self.fitted, [arriving], inside=self.name)
        elif bool(arriving.any()):  # each call of a layer has ranges of its own
            calibrate_ranges(self.fitted, [arriving], inside=self.name)
        fitted: nn.Module = self.fitted
        if isinstance(fitted, FactorisedLayer) and not fitted.rounds_between:
            passed = fitted.apply_dense(arriving)  # equivalent, and faster here
        else:
            passed = fitted(arriving)
        return torch.cat([self.dense(dense_input), passed])

    def _fit(self, dense_patches: torch.Tensor, arriving: torch.Tensor, labels: torch.Tensor) -> nn.Module:
        refitted = refit_to_patches(
            self.name,
            self.dense,
            self.refit,
            dense_patches,
            arriving,
            labels if self.shrink else None,
            mean_absorbed=self.mean_absorbed,
        )
        bias: torch.Tensor | None = getattr(refitted.module, "bias", None)
        if bias is not None and self.mean_absorbed:
            bias += refitted.shift.to(bias)
        self.error = refitted.error
        return refitted.module


@public_call()
def compensate(
    model: nn.Module,
    present: Mapping[str, torch.Tensor],
    images: Inputs,
    *,
    removed: Collection[str] = (),
    substitutes: Mapping[str, nn.Module] | None = None,
    correct_batch_norm: bool = True,
    max_patches: int = PATCHES_PER_LAYER,
    seed: int = 0,
) -> nn.Module:
    """Return a copy of `model` whose weights compensate for what is going to be removed.

    Layer by layer in forward order, the weights on the inputs that stay are solved for by least squares, so
    that the layer's outputs become those of the dense network as nearly as the inputs allow: the channel
    pruning of He et al. (ICCV 2017, eq. 5) with the asymmetric reconstruction of its section 3.3, for a whole
    network in one forward pass. Layers that lose no inputs take part: they undo the errors of those before.

    Args:
        model: The dense model; left untouched.
        present: For layers that lose inputs, which channels (or features) stay, boolean, shape (in,). The
            weights on the others are left in place, to be cut.
        images: Model inputs, one batch of a few hundred to a few thousand.
        removed: Modules, residual blocks say, that are gone in the copy: an identity stands in their place.
        substitutes: What takes the place of some modules behind what is removed, by their names: norms that
            leave out channels that are going to be cut, say. The copy has its own modules again.
        correct_batch_norm: Shift every batch norm's running mean by the change of its input's mean.
        max_patches: Input patches that each layer is fitted on at most. A layer for which they are fewer than
            four for each weight of an output channel keeps its weights.
        seed: Seed of the patch positions.

    Raises:
        DecompositionError: If a module is unknown, a layer is no plain convolution or linear layer, a mask
            does not fit its inputs, the images are unusable, or the model cannot be refitted in one pass.
    """
    model = unwrapped(model)
    (images,) = checked_batches(images, model, present)
    network = copied(model)
    modules = dict(network.named_modules())
    gone = tuple(f"{name}." for name in removed)
    specs = {
        spec.name: spec
        for spec in inspect_layers(model, images)
        if spec.refusal is None and not spec.name.startswith(gone)
    }
    for name in substitutes or {}:
        if name not in modules:
            raise DecompositionError(
                f"there is a substitute for {name!r}, which is no module of the model; take names from "
                "named_modules()"
            )
    for name, mask in present.items():
        if name not in specs:
            raise DecompositionError(
                f"layer {name!r} cannot be refitted to fewer inputs: it is no plain convolution or linear "
                f"layer of the model; choose among {', '.join(specs)}"
            )
        if mask.shape != (specs[name].in_channels,) or mask.dtype != torch.bool:
            raise DecompositionError(
                f"layer {name!r} has {specs[name].in_channels} input channels, its mask is {mask.dtype} of "
                f"shape {tuple(mask.shape)}; give one boolean for each channel"
            )

    def arriving(name: str) -> int:
        inputs = modules[name].weight[0]
        return inputs.numel() if name not in present else inputs[present[name].to(inputs.device)].numel()

    refit_in_lockstep(
        network,
        {name: Solved(modules[name], arriving(name)) for name in specs},
        images,
        present=present,
        removed=removed,
        substitutes=substitutes,
        mean_absorbed={name for name, spec in specs.items() if absorbs_mean(spec, correct_batch_norm)},
        correct_batch_norm=correct_batch_norm,
        max_patches=max_patches,
        seed=seed,
        shrink=False,  # the original weights do not compensate for removed inputs
    )
    return network
