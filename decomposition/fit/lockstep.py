"""Sequential refit: every layer is fitted to the inputs it receives in the compressed network.

Layer by layer in forward order, with x the dense network's input patch and y the one that arrives through the
already compressed layers, the layer is fitted so that V y reproduces W x: the target becomes
W C_xy C_yy^-1 in the metric C_yy (as in the asymmetric reconstruction of Zhang et al., TPAMI 2016). It undoes
the errors of the layers before.

Both networks run in lockstep in one forward pass: the batch holds the images twice, the first half goes
through the dense layers, the second through the compressed ones, and a layer is fitted at the moment its
inputs arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from decomposition.calibration.batch_norm import tracked_batch_norms
from decomposition.calibration.metric import Metric, mean_of, most_rows, worth_factoring
from decomposition.calibration.shrinkage import labels_or_single
from decomposition.errors import DecompositionError
from decomposition.fit.stand_ins import NormPair, RemovedBlock, StandIn, Substituted
from decomposition.fit.targets import from_few_patches, from_many_patches
from decomposition.formats.factorised import FactorisedLayer
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, count_inputs, joined, rows, run_model
from decomposition.network.kinds import DecomposableModule, weight_of
from decomposition.network.layers import LayerSpec
from decomposition.network.outputs import tensors_in
from decomposition.network.patches import labels_of_batch, sample_labelled_patches
from decomposition.network.rounding import calibrate_ranges
from decomposition.network.surgery import copied, replace_module

# A dense layer has so many free numbers that fewer patches for each input would be learnt by heart.
PATCHES_TO_SOLVE = 4
# The error that a layer reports is an average; so many patches, evenly spread, give it to a few digits.
_PATCHES_FOR_ERROR = 16_384
_ADVICE = "use sequential=False (decomposition.sequential=false on the command line)"


@dataclass(frozen=True)
class RefitProblem:
    """What a layer has to reproduce, handed to the function that fits it.

    Shapes: metric (D, D).
    """

    target: torch.Tensor
    metric: Metric | None
    count: int = 0
    start: Sequence[torch.Tensor] | None = None


# Returns the new layer with its weight set, and that weight (out, in, kernel) in float64.
Refit = Callable[[RefitProblem], tuple[nn.Module, torch.Tensor]]


def solved(layer: DecomposableModule, inputs: int) -> Refit:
    """Return the refit of a layer that stays dense: the weight that best undoes the errors before it."""

    def refit(problem: RefitProblem) -> tuple[nn.Module, torch.Tensor]:
        fitted = copied(layer)
        if problem.count >= PATCHES_TO_SOLVE * inputs:
            with torch.no_grad():
                fitted.weight.copy_(problem.target.reshape(fitted.weight.shape))
        return fitted, weight_of(fitted)

    return refit


@dataclass(frozen=True)
class Refitted:
    """A layer fitted to what arrives."""

    module: nn.Module
    shift: torch.Tensor
    error: float


def refit_to_patches(
    dense: DecomposableModule,
    refit: Refit,
    dense_patches: torch.Tensor,
    arriving: torch.Tensor,
    labels: torch.Tensor | None,
    *,
    mean_absorbed: bool,
) -> Refitted:
    """Fit a layer so that on the patches that arrive it does what the dense one does on its own."""
    weight = weight_of(dense)
    matrix = weight.flatten(1)
    # Second moments in half precision are no longer positive, or overflow.
    dense_patches, arriving = (x.float() if x.element_size() < 4 else x for x in (dense_patches, arriving))
    dense_mean, mean = mean_of(dense_patches), mean_of(arriving)
    if len(arriving) > 1:
        solve = from_few_patches if worth_factoring(*arriving.shape) else from_many_patches
        target, metric = solve(
            matrix, dense_patches, arriving, dense_mean, mean, labels, centred=mean_absorbed
        )
        problem = RefitProblem(target.reshape_as(weight), metric, len(arriving))
    else:  # from a single patch nothing is to be learnt of others
        problem = RefitProblem(weight, None, len(arriving))
    fitted, new_weight = refit(problem)
    shift = matrix @ dense_mean - new_weight.flatten(1) @ mean
    some = slice(None, None, max(1, len(arriving) // _PATCHES_FOR_ERROR))
    dense_patches, arriving = dense_patches[some], arriving[some]
    outputs = dense_patches @ matrix.T.to(dense_patches)
    rest = outputs - arriving @ new_weight.flatten(1).T.to(arriving)
    if mean_absorbed:
        rest -= shift.to(rest)
    error = float((rest.square().sum() / outputs.square().sum().clamp_min(1e-300)).sqrt())
    return Refitted(fitted, shift, error)


def absorbs_mean(spec: LayerSpec, correct_batch_norm: bool) -> bool:
    """Whether a change of the layer's mean output can be corrected without new parameters.

    That of a layer that is used several times cannot: each use has another.
    """
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
    """The dense layer for the first half of the batch, its replacement for the second."""

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
        if len(x) % self.batch:  # a multiple: images may have been cut into windows
            raise DecompositionError(
                f"layer {self.name!r}: the first axis of its input, shape {tuple(x.shape)}, does not count "
                f"the batch's {self.batch} inputs, so it cannot be refitted in one pass; {_ADVICE}"
            )
        if x.numel() == 0:  # nothing to fit to
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
            # The network masks what is not finite (`decomposition.calibration.input_check`).
            finite = (dense_patches.isfinite() & patches.isfinite()).all(1)
            dense_patches, patches, labels = dense_patches[finite], patches[finite], labels[finite]
            self.fitted = self._fit(dense_patches, patches, labels)
            calibrate_ranges(self.fitted, [arriving], inside=self.name)
        elif bool(arriving.any()):  # each use of a layer has ranges of its own
            calibrate_ranges(self.fitted, [arriving], inside=self.name)
        fitted: nn.Module = self.fitted
        if isinstance(fitted, FactorisedLayer) and not fitted.rounds_between:
            passed = fitted.apply_dense(arriving)  # it computes the same, here in less time
        else:
            passed = fitted(arriving)
        return torch.cat([self.dense(dense_input), passed])

    def _fit(self, dense_patches: torch.Tensor, arriving: torch.Tensor, labels: torch.Tensor) -> nn.Module:
        refitted = refit_to_patches(
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
