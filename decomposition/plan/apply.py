"""Apply a plan to a network, contract its factorised layers, and group its parameters for an optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from decomposition.calibration.calibration_set import CalibrationInputs, checked_batches
from decomposition.calibration.metric import is_finite
from decomposition.calibration.moments import (
    PATCHES_PER_LAYER,
    InputMoments,
    collect_moments,
    collect_sensitivities,
)
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.refit import Refit, RefitProblem, Solved, absorbs_mean, refit_in_lockstep
from decomposition.formats.layers import FactorisedLayer
from decomposition.network.cost import count_parameters
from decomposition.network.inputs import Inputs, joined, split
from decomposition.network.layers import (
    BatchNorm,
    DecomposableModule,
    LayerSpec,
    is_decomposable_module,
    weight_of,
)
from decomposition.network.rounding import calibrate_ranges, integer_layers, round_whole, without_rounding
from decomposition.network.surgery import copied, replace_module, unwrapped, warn_lost_attributes
from decomposition.operations import (
    FINAL,
    ApplyOptions,
    BatchNormCorrection,
    Factorise,
    FittedLayer,
    GroupOperation,
)
from decomposition.plan.plan import CompressionPlan, LayerPlan, without_growth
from decomposition.progress import Progress, ProgressBar, progress_bar
from decomposition.public_calls import public_call


@public_call()
def contracted(model: nn.Module, only: Collection[str] | None = None) -> nn.Module:
    """Return a copy of a compressed model whose layers contract their cores to the dense weight.

    It computes the same from the same cores; layers that round between their stages stay as they are. On
    hardware that dislikes many small operations, or behind a runtime that contracts constants once when it
    loads a file, it can be the faster form.

    Args:
        model: The compressed model; it is not changed.
        only: Names of the layers to contract; None contracts all.
    """
    network = copied(unwrapped(model))
    for name, layer in factorised_layers(network).items():
        if layer.rounds_between or (only is not None and name not in only):
            continue
        dense = layer.geometry.dense(device="meta", dtype=layer.cores()[0].dtype)
        form = layer.contracted(dense).to_empty(device=layer.cores()[0].device)
        cores = [core.detach() for core in layer.cores()]
        form.load(cores, None if layer.bias is None else layer.bias.detach(), layer.error)
        form.freeze_like(layer.cores()[0], layer.bias)
        replace_module(network, layer, form.train(layer.training))
    return network


def dense_form(model: nn.Module, plan: CompressionPlan) -> nn.Module:
    """Return a copy of a compressed model with its layers contracted to dense ones again."""
    network = copied(unwrapped(model))
    modules = dict(network.named_modules())
    for layer in plan:
        if layer.layer_operations and layer.name in modules:
            replace_module(network, modules[layer.name], _dense_layer(modules[layer.name]))
    return network


def _dense_layer(module: nn.Module) -> nn.Module:
    """Return the dense form of a layer, which operations may have wrapped."""
    for part in without_rounding(copied(module)).modules():
        if isinstance(part, FactorisedLayer):
            return part.to_dense().train(module.training)
        if is_decomposable_module(part):
            return part
    return module


def factorised_layers(model: nn.Module) -> dict[str, FactorisedLayer]:
    """Return the factorised layers of a compressed model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorisedLayer)}


Entries = dict[str, tuple[LayerPlan, LayerSpec]]
"""Each layer's entry in a plan, with the layer that it is for, by name."""


def check_applied(model: nn.Module, compressed: nn.Module, entries: Entries) -> None:
    modules, factorised = dict(compressed.named_modules()), factorised_layers(compressed)
    expected = count_parameters(model)
    for name, (entry, spec) in entries.items():
        expected += entry.cost(spec).params - spec.params
        factorisation, layer = entry.operation(Factorise), modules[name]
        if factorisation is None:
            continue
        if not isinstance(layer, FactorisedLayer):
            layer = next((part for part in layer.modules() if isinstance(part, FactorisedLayer)), None)
        if layer is None or layer.error is None:
            raise DecompositionError(
                f"layer {name!r} was not decomposed: none of the calibration inputs reached it; give inputs "
                "that do, or leave the layer without operations in the plan"
            )
        if (layer.tensor_format.name, layer.ranks) != (factorisation.format, factorisation.ranks):
            raise DecompositionError(
                f"layer {name!r} became {layer.tensor_format.name} of ranks {list(layer.ranks)}, the plan "
                f"says {factorisation.format} of ranks {list(factorisation.ranks)}"
            )
        if not all(bool(torch.isfinite(core).all()) for core in layer.cores()):
            raise DecompositionError(
                f"layer {name!r}: its cores are not finite in {layer.cores()[0].dtype}; use a type of wider "
                "range, such as float32"
            )
    planned = tuple(name for name, (entry, _) in entries.items() if entry.operation(Factorise) is not None)
    surplus = sorted(
        name for name in factorised if name not in planned and not name.startswith(_inside(planned))
    )
    if surplus:
        raise DecompositionError(f"the plan leaves {surplus[0]!r} dense, but it was decomposed")
    if count_parameters(compressed) != expected:
        raise DecompositionError(
            f"the compressed model has {count_parameters(compressed):,} parameters, the plan adds up to "
            f"{expected:,}; parameters that layers share (a bias, say) cannot be kept shared: give every "
            "layer its own"
        )


def _inside(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name prefixes of modules inside these layers; operations may wrap a layer."""
    return tuple(f"{name}." for name in names)


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
    model: nn.Module, entries: Entries, images: Inputs | None, options: ApplyOptions, bar: ProgressBar
) -> nn.Module:
    changed = {name: pair for name, pair in entries.items() if pair[0].layer_operations}
    modules = dict(model.named_modules())
    for name in changed:
        if not is_finite(modules[name].weight.detach()):
            raise DecompositionError(
                f"layer {name!r}: its weight holds NaN or infinite values; repair it first"
            )
    factorised = [name for name, (entry, _) in changed.items() if entry.operation(Factorise) is not None]
    warn_lost_attributes(model, {name: modules[name] for name in factorised})
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
    """Fit every layer, dense ones too, to the inputs that reach it in the compressed network."""
    modules = dict(model.named_modules())
    correct_mean = options.batch_norm == "mean"

    def refit(name: str) -> Refit:
        entry, spec = entries[name]
        dense: DecomposableModule = modules[name]
        if not entry.layer_operations:
            return Solved(dense, dense.weight[0].numel())

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
    """Fit every layer to its inputs in the dense network or, without inputs, to its weight."""
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
    """Apply an entry's operations in sequence to a dense layer."""
    fitted = FittedLayer(dense, problem.target)
    for operation in entry.layer_operations:
        fitted = operation.fit(fitted.module, spec, problem, sensitivity=sensitivity, options=options)
    return fitted


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters of a compressed network in groups for a torch optimizer.

    Each of the n cores of a layer has an n-th of the decay (of PIFA one factor has all), so that the weight
    that they contract to decays, to first order, as that of a dense layer; with all of it on each core it
    would decay n times. Biases and other vectors do not decay.

    Args:
        model: The network; parameters that require no gradient are left out.
        weight_decay: Decay of a dense layer's weight, 0 or more.

    Returns:
        What `torch.optim.AdamW(groups, lr=...)` takes: `params` and their `weight_decay`.
    """
    shares: dict[int, float] = {}
    for layer in factorised_layers(model).values():
        shares |= {id(core): share for core, share in layer.decay_shares().items()}
    groups: dict[float, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        share = shares.get(id(parameter), float(parameter.ndim > 1))
        if parameter.requires_grad:
            groups[share * weight_decay].append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
