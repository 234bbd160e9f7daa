"""Applying a plan: the one function that turns a model and a plan into a compressed model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from decomposition.apply.applied_check import Entries, check_applied
from decomposition.apply.forms import factorised_layers
from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.calibration.input_check import checked_batches
from decomposition.calibration.moments import PATCHES_PER_LAYER, InputMoments, collect_moments
from decomposition.calibration.sensitivity import collect_sensitivities
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.lockstep import Refit, RefitProblem, absorbs_mean, refit_in_lockstep, solved
from decomposition.network.inputs import Inputs, joined, split
from decomposition.network.kinds import BatchNorm, DecomposableModule, weight_of
from decomposition.network.layers import LayerSpec
from decomposition.network.left_behind import tell_of_lost
from decomposition.network.rounding import calibrate_ranges, integer_layers, round_whole
from decomposition.network.surgery import copied, replace_module
from decomposition.operations import (
    ApplyOptions,
    BatchNormCorrection,
    Factorise,
    FittedLayer,
    GroupOperation,
)
from decomposition.operations.base import FINAL
from decomposition.plan.layer_plan import LayerPlan, without_growth
from decomposition.plan.plan import CompressionPlan
from decomposition.progress import Progress, ProgressBar, progress_bar
from decomposition.public_calls import public_call


@public_call()
def apply_plan(
    model: nn.Module,
    plan: CompressionPlan,
    calibration: CalibrationInputs | None = None,
    *,
    sequential: bool = True,
    weigh_outputs: bool = True,
    batch_norm: BatchNormCorrection = "mean",
    options: FitOptions = FINAL,
    max_patches: int = PATCHES_PER_LAYER,
    seed: int = 0,
    statistics: CalibrationInputs | None = None,
    progress: Progress = None,
) -> nn.Module:
    """Return a compressed copy of `model`.

    Args:
        model: The dense model; left untouched.
        plan: What becomes of every layer. Group operations (a removal of channels, say) are applied first.
        calibration: Model inputs, a few hundred to a few thousand: one batch of them (a tensor, a tuple or a
            dict of tensors), or batches, such as a data loader, whose labels are left away. Without them
            layers are fitted to their weights alone, which keeps far less accuracy.
        sequential: With calibration: fit each layer to the inputs it receives in the compressed network
            (one pass of twice the images through the model); otherwise to those of the dense network.
        weigh_outputs: With calibration: weigh a layer's output channels by what the dense network's output
            makes of them (`collect_sensitivities`; one more pass, forward and backward).
        batch_norm: With calibration: `keep` the running statistics, correct their `mean` for the change of
            each input's mean, or `reestimate` them on `statistics`.
        options: How much work each fit may do.
        max_patches: Input patches that each layer is fitted on at most.
        seed: Seed of the patch positions.
        statistics: Inputs to re-estimate running statistics on, as the model was trained on them: with the
            same augmentation. `None` takes the calibration inputs.
        progress: Where progress goes: `None` draws a bar on a terminal, `False` shows nothing; a function is
            called with "apply plan", the number of layers that are done and the number of all.

    Returns:
        The compressed model in the mode (train or eval) of `model`. Its factorised layers carry the relative
        output error of their fit as `error`.

    Raises:
        PlanError: If the plan does not fit the model.
        DecompositionError: If a rank is not feasible, a weight is not finite, the calibration set is empty or
            does not reach a layer, or the result is not what the plan says.
    """
    model = plan.prepared(model)
    specs = plan.specs(model)
    fitted = [layer.name for layer in plan if layer.layer_operations]
    images = None if calibration is None else joined(checked_batches(calibration, model, fitted))
    inputs = images if images is None or statistics is None else joined(checked_batches(statistics, model))
    apply_options = ApplyOptions(sequential, weigh_outputs, batch_norm, options, max_patches, seed, inputs)

    def apply_group(
        kind: type[GroupOperation], network: nn.Module, operations: Mapping[str, GroupOperation]
    ) -> nn.Module:
        return kind.apply_group(network, operations, plan.input_shape, images, apply_options)

    model, rest = plan.after_groups(model, apply_group)
    entries = {
        layer.name: (without_growth(layer, spec), spec) for layer, spec in zip(rest, specs, strict=True)
    }
    changed = sum(bool(entry.layer_operations) for entry, _ in entries.values())
    with progress_bar("apply plan", changed, progress=progress) as bar:
        return _apply_to_layers(model, entries, images, apply_options, bar)


@public_call(values=False)
def build_structure(model: nn.Module, plan: CompressionPlan) -> nn.Module:
    """Return a copy of `model` with the plan's layers in place, without setting their values.

    A saved compressed model is loaded into it; the result of `apply_plan` has the same parameters.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    model = plan.prepared(model)
    specs = plan.specs(model)

    def group_structure(
        kind: type[GroupOperation], network: nn.Module, operations: Mapping[str, GroupOperation]
    ) -> nn.Module:
        return kind.group_structure(network, operations, plan.input_shape)

    model, rest = plan.after_groups(model, group_structure)
    structure = copied(model)
    modules = dict(structure.named_modules())
    for layer, spec in zip(rest, specs, strict=True):
        dense = module = modules[layer.name]
        for operation in without_growth(layer, spec).layer_operations:
            module = operation.structure(module, spec)
        if module is not dense:
            replace_module(structure, dense, module)
    if integer_layers(structure):
        round_whole(structure)
    return structure


def _apply_to_layers(
    model: nn.Module,
    entries: Entries,
    images: Inputs | None,
    options: ApplyOptions,
    bar: ProgressBar,
) -> nn.Module:
    """Return a copy of `model` with the operations of single layers applied."""
    changed = {name: pair for name, pair in entries.items() if pair[0].layer_operations}
    modules = dict(model.named_modules())
    for name in changed:
        if not bool(torch.isfinite(weight_of(modules[name])).all()):
            raise DecompositionError(
                f"layer {name!r}: its weight holds NaN or infinite values; repair it first"
            )
    factorised = [name for name, (entry, _) in changed.items() if entry.operation(Factorise) is not None]
    tell_of_lost(model, {name: modules[name] for name in factorised})
    compressed = copied(model)
    sensitivities: dict[str, torch.Tensor] = {}
    if images is not None and options.weigh_outputs and changed:
        watched = [spec for _, spec in changed.values()]
        sensitivities = collect_sensitivities(model, watched, images, seed=options.seed)
    if images is not None and options.sequential and changed:
        _apply_sequentially(compressed, entries, images, sensitivities, options, bar)
    else:
        _apply_apart(compressed, changed, images, sensitivities, options, bar)
    if options.batch_norm == "reestimate":
        options.reestimate(compressed)
    if integer_layers(compressed):
        round_whole(compressed)
    if images is not None:
        calibrate_ranges(compressed, split(images, 256))
    check_applied(model, compressed, entries)
    return compressed


def _apply_sequentially(
    model: nn.Module,
    entries: Entries,
    images: Inputs,
    sensitivities: dict[str, torch.Tensor],
    options: ApplyOptions,
    bar: ProgressBar,
) -> None:
    """Fit every layer, also those that stay dense, to the inputs that reach it in the compressed network."""
    modules = dict(model.named_modules())
    correct_mean = options.batch_norm == "mean"

    def refit(name: str) -> Refit:
        entry, spec = entries[name]
        dense: DecomposableModule = modules[name]
        if not entry.layer_operations:
            return solved(dense, weight_of(dense)[0].numel())

        def fit(problem: RefitProblem) -> tuple[nn.Module, torch.Tensor]:
            fitted = fitted_layer(dense, entry, spec, problem, sensitivities.get(name), options.fit)
            bar.advance()
            return fitted.module, fitted.weight

        return fit

    taking_part = {
        n: pair for n, pair in entries.items() if pair[0].layer_operations or pair[1].refusal is None
    }
    errors = refit_in_lockstep(
        model,
        {name: refit(name) for name in taking_part},
        images,
        mean_absorbed={name for name, (_, spec) in taking_part.items() if absorbs_mean(spec, correct_mean)},
        correct_batch_norm=correct_mean,
        max_patches=options.max_patches,
        seed=options.seed,
    )
    fitted = dict(model.named_modules())
    for name, error in errors.items():  # a later operation may have wrapped the factorised layer
        for layer in factorised_layers(fitted[name]).values():
            layer.error = error


def _apply_apart(
    model: nn.Module,
    entries: Entries,
    images: Inputs | None,
    sensitivities: dict[str, torch.Tensor],
    options: ApplyOptions,
    bar: ProgressBar,
) -> None:
    """Fit every layer to the inputs of the dense network, or to its weight."""
    modules = dict(model.named_modules())
    moments: dict[str, InputMoments] = {}
    if images is not None and entries:
        watched = [spec for _, spec in entries.values()]
        batches = split(images, 256)
        moments = collect_moments(model, watched, batches, max_patches=options.max_patches, seed=options.seed)
    for name, (entry, spec) in entries.items():
        dense: DecomposableModule = modules[name]
        moment = moments.get(name)
        absorbed = moment is not None and absorbs_mean(spec, options.batch_norm == "mean")
        metric = None if moment is None else moment.metric(centred=absorbed)
        problem = RefitProblem(weight_of(dense), metric)
        fitted = fitted_layer(dense, entry, spec, problem, sensitivities.get(name), options.fit)
        replace_module(model, dense, fitted.module)
        bar.advance()
        if moment is not None and absorbed:
            difference = weight_of(dense) - fitted.weight
            _absorb(fitted.module, modules.get(spec.batch_norm or ""), difference.flatten(1) @ moment.mean)


def _absorb(layer: nn.Module, norm: nn.Module | None, change: torch.Tensor) -> None:
    """Add the lost mean output (dense minus compressed) to the bias, or take it off the batch norm's mean."""
    with torch.no_grad():
        bias: torch.Tensor | None = getattr(layer, "bias", None)
        if bias is not None:
            bias += change.to(bias)
        elif isinstance(norm, BatchNorm) and norm.running_mean is not None:
            norm.running_mean -= change.to(norm.running_mean)


def fitted_layer(
    dense: DecomposableModule,
    entry: LayerPlan,
    spec: LayerSpec,
    problem: RefitProblem,
    sensitivity: torch.Tensor | None,
    options: FitOptions,
) -> FittedLayer:
    """Apply an entry's operations one after the other to a dense layer."""
    fitted = FittedLayer(dense, problem.target)
    for operation in entry.layer_operations:
        fitted = operation.fit(fitted.module, spec, problem, sensitivity=sensitivity, options=options)
    return fitted
