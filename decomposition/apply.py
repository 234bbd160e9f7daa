"""Carrying out a plan: the one function that turns a model and a plan into a compressed model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import nn

from decomposition.batch_norm import reestimate_batch_norm
from decomposition.cost import count_parameters
from decomposition.errors import DecompositionError
from decomposition.factorised import ContractedLayer, FactorisedLayer
from decomposition.fitting import FitOptions, fit_weight
from decomposition.formats import get_format
from decomposition.layers import DecomposableModule, LayerSpec
from decomposition.library import weight_of
from decomposition.lockstep import Refit, RefitProblem, absorbs_mean, refit_in_lockstep, solved
from decomposition.moments import (
    PATCHES_PER_LAYER,
    InputMoments,
    calibration_batches,
    check_images,
    collect_moments,
)
from decomposition.plan import CompressionPlan, LayerPlan, without_growth
from decomposition.sensitivity import collect_sensitivities
from decomposition.surgery import copied, replace_module

BatchNormCorrection = Literal["keep", "mean", "reestimate"]
FINAL = FitOptions(iterations=200)


def apply_plan(
    model: nn.Module,
    plan: CompressionPlan,
    calibration: torch.Tensor | Iterable[torch.Tensor] | None = None,
    *,
    sequential: bool = True,
    weigh_outputs: bool = True,
    batch_norm: BatchNormCorrection = "mean",
    options: FitOptions = FINAL,
    max_patches: int = PATCHES_PER_LAYER,
    seed: int = 0,
) -> nn.Module:
    """Return a compressed copy of `model`.

    Args:
        model: The dense model; left untouched.
        plan: What becomes of every layer.
        calibration: Model inputs, a few hundred to a few thousand, as one tensor or in batches. Without them
            layers are fitted to their weights alone, which keeps far less accuracy.
        sequential: With calibration: fit each layer to the inputs it receives in the compressed network
            (one pass of twice the images through the model); otherwise to those of the dense network.
        weigh_outputs: With calibration: weigh a layer's output channels by what the dense network's output
            makes of them (`collect_sensitivities`; one more pass, forward and backward).
        batch_norm: With calibration: `keep` the running statistics, correct their `mean` for the change of
            each input's mean, or `reestimate` them on the calibration inputs.
        options: How much work each fit may do.
        max_patches: Input patches that each layer is fitted on at most.
        seed: Seed of the patch positions.

    Returns:
        The compressed model in the mode (train or eval) of `model`. Its factorised layers carry the relative
        output error of their fit as `error`.

    Raises:
        PlanError: If the plan does not fit the model.
        DecompositionError: If a rank is not feasible, a weight is not finite, the calibration set is empty or
            does not reach a layer, or the result is not what the plan says.
    """
    specs = plan.specs(model)
    entries = {
        layer.name: (without_growth(layer, spec), spec) for layer, spec in zip(plan, specs, strict=True)
    }
    decomposed = {name: pair for name, pair in entries.items() if pair[0].format is not None}
    kept = {n: pair for n, pair in entries.items() if pair[0].format is None and pair[1].refusal is None}
    modules = dict(model.named_modules())
    for name in decomposed:
        if not bool(torch.isfinite(weight_of(modules[name])).all()):
            raise DecompositionError(
                f"layer {name!r}: its weight holds NaN or infinite values; repair it first"
            )
    images = None if calibration is None else _as_tensor(calibration)
    compressed = copied(model)
    modules = dict(compressed.named_modules())
    watched = [spec for _, spec in decomposed.values()]
    sensitivities: dict[str, torch.Tensor] = {}
    if images is not None and weigh_outputs and watched:
        sensitivities = collect_sensitivities(model, watched, images, seed=seed)
    if images is not None and sequential and decomposed:
        _apply_sequentially(
            compressed,
            decomposed | kept,
            images,
            sensitivities,
            correct_mean=batch_norm == "mean",
            options=options,
            max_patches=max_patches,
            seed=seed,
        )
    else:
        moments: dict[str, InputMoments] = {}
        if images is not None and watched:
            batches = images.split(256)
            moments = collect_moments(model, watched, batches, max_patches=max_patches, seed=seed)
        for name, (entry, spec) in decomposed.items():
            dense: DecomposableModule = modules[name]
            moment = moments.get(name)
            absorbed = moment is not None and absorbs_mean(spec, batch_norm == "mean")
            metric = None if moment is None else moment.metric(centred=absorbed)
            problem = RefitProblem(weight_of(dense), metric)
            layer = _fitted_layer(dense, entry, spec, problem, sensitivities.get(name), options)
            replace_module(compressed, dense, layer)
            if moment is not None and absorbed:
                difference = weight_of(dense) - weight_of(layer.to_dense())
                _absorb(layer, modules.get(spec.batch_norm or ""), difference.flatten(1) @ moment.mean)
    if batch_norm == "reestimate" and images is not None:
        reestimate_batch_norm(compressed, images.split(256))
    _check_carried_out(model, compressed, entries)
    return compressed


def build_structure(model: nn.Module, plan: CompressionPlan) -> nn.Module:
    """Return a copy of `model` with the plan's layers in place and their cores not fitted.

    Used to load a saved compressed model into; the result of `apply_plan` has the same parameters.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    specs = plan.specs(model)
    structure = copied(model)
    modules = dict(structure.named_modules())
    for layer, spec in zip(plan, specs, strict=True):
        entry = without_growth(layer, spec)
        if entry.format is not None:
            dense: DecomposableModule = modules[layer.name]
            replace_module(structure, dense, _empty_layer(dense, entry, spec))
    return structure


def contracted(model: nn.Module) -> nn.Module:
    """Return a copy of a compressed model whose layers contract their cores to the dense weight.

    It computes the same from the same cores. On hardware that dislikes many small operations, or behind a
    runtime that contracts constants once when it loads a file, it can be the faster form.
    """
    network = copied(model)
    for layer in factorised_layers(network).values():
        dense = layer.geometry.dense(device="meta", dtype=layer.cores()[0].dtype)
        form = ContractedLayer(dense, layer.tensor_format, layer.modes, layer.ranks, "dense")
        form = form.to_empty(device=layer.cores()[0].device)
        cores = [core.detach() for core in layer.cores()]
        form.load(cores, None if layer.bias is None else layer.bias.detach(), layer.error)
        replace_module(network, layer, form.train(layer.training))
    return network


def dense_form(model: nn.Module) -> nn.Module:
    """Return a copy of a compressed model with dense layers of the contracted weights in place again."""
    network = copied(model)
    for layer in factorised_layers(network).values():
        replace_module(network, layer, layer.to_dense().train(layer.training))
    return network


def factorised_layers(model: nn.Module) -> dict[str, FactorisedLayer]:
    """Return the factorised layers of a compressed model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorisedLayer)}


def _check_carried_out(
    model: nn.Module, compressed: nn.Module, entries: Mapping[str, tuple[LayerPlan, LayerSpec]]
) -> None:
    """Refuse a result that is not what the plan says, whatever went wrong on the way.

    Raises:
        DecompositionError: If a layer is not in the form that its entry says, its cores are not fitted or not
            finite, or the parameters are not as many as the plan adds up to.
    """
    modules, found = dict(compressed.named_modules()), factorised_layers(compressed)
    expected = count_parameters(model)
    for name, (entry, spec) in entries.items():
        expected += entry.params(spec) - spec.params
        layer = modules[name]
        if entry.format is None:
            continue
        if not isinstance(layer, FactorisedLayer) or layer.error is None:
            raise DecompositionError(
                f"layer {name!r} was not decomposed: none of the calibration inputs reached it; give inputs "
                "that do, or leave the layer dense in the plan (format null, no ranks)"
            )
        if (layer.tensor_format.name, layer.ranks) != (entry.format, entry.ranks):
            raise DecompositionError(
                f"layer {name!r} became {layer.tensor_format.name} of ranks {list(layer.ranks)}, the plan "
                f"says {entry.format} of ranks {list(entry.ranks)}"
            )
        if not all(bool(torch.isfinite(core).all()) for core in layer.cores()):
            raise DecompositionError(
                f"layer {name!r}: its cores are not finite in {layer.cores()[0].dtype}; use a type of wider "
                "range, such as float32"
            )
    surplus = sorted(set(found) - {name for name, (entry, _) in entries.items() if entry.format is not None})
    if surplus:
        raise DecompositionError(f"the plan leaves {surplus[0]!r} dense, but it was decomposed")
    if count_parameters(compressed) != expected:
        raise DecompositionError(
            f"the compressed model has {count_parameters(compressed):,} parameters, the plan adds up to "
            f"{expected:,}; parameters that layers share (a bias, say) cannot be kept shared: give every "
            "layer its own"
        )


def _as_tensor(calibration: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    batches = calibration_batches(calibration)
    images = torch.cat(batches) if batches else torch.empty(0)
    check_images(images)
    return images


def _apply_sequentially(
    model: nn.Module,
    entries: dict[str, tuple[LayerPlan, LayerSpec]],
    images: torch.Tensor,
    sensitivities: dict[str, torch.Tensor],
    *,
    correct_mean: bool,
    options: FitOptions,
    max_patches: int,
    seed: int,
) -> None:
    modules = dict(model.named_modules())

    def refit(name: str) -> Refit:
        entry, spec = entries[name]
        dense: DecomposableModule = modules[name]

        def fit(problem: RefitProblem) -> tuple[nn.Module, torch.Tensor]:
            layer = _fitted_layer(dense, entry, spec, problem, sensitivities.get(name), options)
            return layer, weight_of(layer.to_dense())

        return fit

    def solve(name: str) -> Refit:
        return solved(modules[name], weight_of(modules[name])[0].numel())

    errors = refit_in_lockstep(
        model,
        {name: solve(name) if entry.format is None else refit(name) for name, (entry, _) in entries.items()},
        images,
        mean_absorbed={name for name, (_, spec) in entries.items() if absorbs_mean(spec, correct_mean)},
        correct_batch_norm=correct_mean,
        max_patches=max_patches,
        seed=seed,
    )
    for name, layer in factorised_layers(model).items():
        layer.error = errors[name]


def _absorb(layer: FactorisedLayer, norm: nn.Module | None, change: torch.Tensor) -> None:
    """Add the lost mean output (dense minus compressed) to the bias, or take it off the batch norm's mean."""
    with torch.no_grad():
        bias = layer.bias
        if bias is not None:
            bias += change.to(bias)
        elif isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) and norm.running_mean is not None:
            norm.running_mean -= change.to(norm.running_mean)


def _empty_layer(dense: DecomposableModule, entry: LayerPlan, spec: LayerSpec) -> FactorisedLayer:
    assert entry.format is not None
    layer = get_format(entry.format).build(dense, spec, entry.modes(spec), entry.ranks)
    return layer.train(dense.training)


def _fitted_layer(
    dense: DecomposableModule,
    entry: LayerPlan,
    spec: LayerSpec,
    problem: RefitProblem,
    sensitivity: torch.Tensor | None,
    options: FitOptions,
) -> FactorisedLayer:
    layer = _empty_layer(dense, entry, spec)
    fit = fit_weight(
        layer.tensor_format,
        problem.target,
        layer.modes,
        entry.ranks,
        problem.metric,
        options,
        sensitivity=sensitivity,
    )
    layer.load(fit.cores, dense.bias, fit.error)
    return layer
