"""Estimate the sensitivity of the network's output to each layer's output (Gauss-Newton, as in K-FAC).

An error e in a layer's output changes the network's output y by J e. To second order the loss grows with
E|J e|^2 = tr(G E[e e']), G = E[J' J] summed over positions: the Gauss-Newton matrix of a squared error on
the network's outputs, and the factor that K-FAC (Martens & Grosse, ICML 2015) calls the pre-activation
statistics. G is estimated without labels, by sending random directions v ~ N(0, I) backwards:
E[J' v v' J] = E[J' J].

Several outputs, and quantities of different units in one of them (`decomposition.calibration.units`), count
alike: J is that of the outputs relative to their own deviations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from decomposition.calibration.calibration_set import CalibrationInputs, checked_batches
from decomposition.calibration.metric import WIDEST, Spread, gram, shrunk_matrix
from decomposition.calibration.units import Array, find_units, known_answers, output_weight
from decomposition.errors import DecompositionError
from decomposition.network.cost import evaluation_mode, watching
from decomposition.network.geometry import labels_of_batch
from decomposition.network.inputs import (
    Inputs,
    count_inputs,
    mapped,
    numbers_in_one,
    rows,
    run_model,
    split,
    tensors_in,
    tensors_of,
)
from decomposition.network.layers import LayerSpec
from decomposition.network.surgery import unwrapped
from decomposition.public_calls import public_call

log = logging.getLogger(__name__)

# Inputs in a batch, and numbers in them: a backward pass holds all activations of its batch.
_BATCH = 64
_ELEMENTS = 2**20
_ANSWERED, _ANSWERED_NUMBERS = 32, 2**26
"""Inputs whose outputs tell their units, and numbers in them, whichever is fewer."""
_PERTURBED, _DIRECTIONS, _STEP = 16, 64, 0.1
"""Inputs that are perturbed, groups of channels at most, and the step as a share of the output's root mean
square: of the size of what a fit changes."""
_SILENT_SHARE = 0.1
"""Of a perturbation's effect, from channels without a gradient; a dead unit that a step wakes has less."""
_SUM_TOLERANCE, _LEAST_PROBABILITY = 1e-2, 1e-12
"""How far class probabilities are off 1 together, rounded as they are, and the least that is told from 0."""


@public_call()
def collect_sensitivities(
    model: nn.Module, specs: Sequence[LayerSpec], calibration: CalibrationInputs, *, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Estimate the sensitivity matrix of every layer in one forward and backward pass.

    Args:
        model: The dense network; left as it was. Its output may be a tensor or any nesting of tensors; of
            class probabilities (N, classes) the logits count.
        specs: Layers to watch.
        calibration: Batches of model inputs, or one batch (`decomposition.network`); labels are left away.
        seed: Seed of the random directions.

    Returns:
        G (out, out), float64, by layer name: summed over the output's positions and a layer's calls, the mean
        over inputs, shrunk towards the identity as far as few inputs leave it undetermined
        (`decomposition.calibration`). Layers that the output does not depend on, whose gradient is not finite
        or that have more than 8,192 outputs are left out.

    Raises:
        DecompositionError: If no gradient can be sent back through the model.
    """
    model = unwrapped(model)
    batches = checked_batches(calibration, model)
    modules = dict(model.named_modules())
    sums: dict[str, torch.Tensor] = {}
    spreads: dict[str, Spread] = {}
    generator = torch.Generator().manual_seed(seed)
    inputs = 0
    reached: dict[str, int] = {}  # output channels by layer name
    current: list[Inputs] = []  # the batch that is running

    def watch(name: str, linear: bool) -> torch.utils.hooks.RemovableHandle:
        def add(gradient: torch.Tensor) -> None:
            if gradient.numel() == 0:
                return
            axis = len(gradient)
            flat = (gradient if linear else gradient.movedim(1, -1)).flatten(0, -2).float()
            sums[name] = sums.get(name, torch.zeros(())) + gram(flat).double().cpu()
            labels = torch.arange(len(flat), device=flat.device) // (len(flat) // axis)
            spreads.setdefault(name, Spread()).add(
                flat, labels_of_batch(labels, axis, count_inputs(current[0]))
            )

        def hook(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if not output.requires_grad and not output.is_inference():  # no gradient would reach the layer
                output = output.detach().requires_grad_().clone()
            if output.requires_grad:
                output.register_hook(add)
            reached.update({name: output.shape[-1 if linear else 1]} if output.numel() else {})
            return output

        return modules[name].register_forward_hook(hook)

    # If inputs are integers, gradients come from parameters, some or all of which may be frozen.
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    before = [(parameter.requires_grad, parameter.grad) for parameter in parameters]
    weights = _unit_weights(model, batches)
    handles = [watch(spec.name, spec.kind == "linear") for spec in specs if spec.out_channels <= WIDEST]
    try:
        with watching(model, handles), torch.enable_grad():
            for images in batches:
                for batch in split(images, _size(images)):
                    current[:] = [batch]
                    real = all(tensor.is_floating_point() for tensor in tensors_of(batch))
                    for parameter in parameters:  # only gradients of activations are needed
                        parameter.requires_grad_(not real)
                    outputs = run_model(model, mapped(_watched, batch))
                    _send_back(outputs, weights, generator)
                    inputs += count_inputs(batch)
    except RuntimeError as error:
        raise DecompositionError(
            f"no gradient can be sent back through {type(model).__name__} ({str(error).splitlines()[0]}); "
            "use weigh_outputs=False (decomposition.weigh_outputs=false on the command line)"
        ) from error
    finally:
        for parameter, (learnt, gradient) in zip(parameters, before, strict=True):
            parameter.requires_grad_(learnt)
            parameter.grad = gradient
    sensitivities = {name: total / max(1, inputs) for name, total in sums.items()}
    zeros = {name: torch.zeros(channels, channels) for name, channels in reached.items()}
    silent = {
        name: matrix.diagonal() == 0
        for name, matrix in {**zeros, **sensitivities}.items()
        if bool((matrix.diagonal() == 0).any())
    }
    measured = _measured(
        model, {spec.name: spec.kind == "linear" for spec in specs}, silent, batches, weights, generator
    )
    return measured | {
        name: shrunk_matrix(matrix, spreads[name].shrinkage(matrix, 1 / inputs))
        for name, matrix in sensitivities.items()
        if name not in measured and bool(torch.isfinite(matrix).all()) and matrix.diagonal().sum() > 0
    }


def _size(images: Inputs) -> int:
    """Return the batch size of the backward pass."""
    return max(1, min(_BATCH, _ELEMENTS // max(1, numbers_in_one(images))))


def _measured(
    model: nn.Module,
    linear: Mapping[str, bool],
    silent: Mapping[str, torch.Tensor],
    batches: Sequence[Inputs],
    weights: Sequence[torch.Tensor],
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Estimate by perturbation (with random signs) the sensitivity of layers that receive no gradient."""
    if not silent:
        return {}
    batch = rows(batches[0], slice(_PERTURBED))
    modules, sizes = dict(model.named_modules()), dict[str, torch.Tensor]()

    def run(name: str | None = None, moved: torch.Tensor | None = None) -> torch.Tensor:
        def hook(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
            if name is None or moved is None or output.numel() == 0:
                return None
            axis = output.ndim - 1 if linear[name] else 1
            signs = torch.randn(output.shape, generator=generator).sign().to(output)
            along = [-1 if each == axis else 1 for each in range(output.ndim)]
            return output + sizes[name].to(output) * signs * moved.to(output).reshape(along)

        def look(each: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
            def note(_: nn.Module, __: Any, output: torch.Tensor) -> None:
                if output.numel():
                    sizes[each] = _STEP * output.detach().float().square().mean().sqrt()

            return note

        watched = {each: look(each) for each in silent} if name is None else {name: hook}
        handles = [modules[each].register_forward_hook(act) for each, act in watched.items()]
        with watching(model, handles):
            outputs = tensors_in(run_model(model, batch))
        numbers = [
            (_logits(y) * weight.to(y)).flatten().double()
            for y, weight in zip(outputs, weights, strict=True)
            if y.is_floating_point()
        ]
        return torch.cat(numbers) if numbers else torch.zeros(0)

    known = run()
    if not torch.equal(known, run()):  # random outputs would count as reactions
        return {}

    def effect(name: str, moved: torch.Tensor) -> float:
        change = run(name, moved.double()) - known
        return float((change / sizes[name]).square().sum()) / count_inputs(batch)

    measured = {}
    for name in (name for name in silent if sizes.get(name, torch.zeros(())) > 0):
        channels = silent[name]
        whole = effect(name, torch.ones_like(channels))
        if not effect(name, channels) > _SILENT_SHARE * whole > 0:
            continue
        groups = torch.arange(len(channels)).chunk(_DIRECTIONS)
        each = [effect(name, torch.zeros(len(channels)).index_fill(0, group, 1.0)) for group in groups]
        diagonal = torch.cat(
            [torch.full((len(group),), e / len(group)) for group, e in zip(groups, each, strict=True)]
        )
        if bool(torch.isfinite(diagonal).all()) and diagonal.sum() > 0:
            measured[name] = torch.diag(diagonal.double())
    if measured:
        log.warning(
            "gradients are stopped behind %s, which count for the outputs all the same: how much is measured "
            "by perturbing them instead",
            ", ".join(measured),
        )
    return measured


def _watched(x: torch.Tensor) -> torch.Tensor:
    """Return an input that requires gradients."""
    return x.detach().requires_grad_(x.is_floating_point())


def _unit_weights(model: nn.Module, batches: Sequence[Inputs]) -> list[torch.Tensor]:
    """Return the weight of every output tensor at which all quantities count alike, 1 at most."""
    answers: list[list[Array]] = []
    inputs = numbers = 0
    with evaluation_mode(model):
        for batch in (part for images in batches for part in split(images, _size(images))):
            if inputs >= _ANSWERED or numbers >= _ANSWERED_NUMBERS:
                break
            outputs = [_logits(y) for y in tensors_in(run_model(model, batch))]
            answers.append([y.float().cpu().numpy() for y in outputs])
            inputs += count_inputs(batch)
            numbers += sum(y.numel() for y in outputs)
    known = [known_answers(each) for each in zip(*answers, strict=True)]
    weights = [output_weight(each, find_units(each)) for each in known]
    largest = max((float(each.max()) for each in weights), default=1.0)
    return [torch.from_numpy(np.asarray(each / largest, np.float32)) for each in weights]


def _send_back(outputs: object, weights: Sequence[torch.Tensor], generator: torch.Generator) -> None:
    """Backpropagate a random direction from every differentiable output tensor, scaled by its weight."""
    pairs = zip(tensors_in(outputs), weights, strict=True)
    reached = [(_logits(y), weight) for y, weight in pairs if y.requires_grad]
    directions = [
        torch.randn(y.shape, generator=generator, dtype=torch.float32).mul_(weight).to(y)
        for y, weight in reached
    ]
    if reached:
        torch.autograd.backward([y for y, _ in reached], directions)


def _logits(y: torch.Tensor) -> torch.Tensor:
    """Return the logits of rows of class probabilities, whose own gradients vanish near 1."""
    if y.ndim != 2 or y.shape[1] < 2 or bool((y < 0).any()):
        return y
    if float((y.detach().sum(1) - 1).abs().max()) > _SUM_TOLERANCE:
        return y
    logarithms = y.clamp_min(_LEAST_PROBABILITY).log()
    return logarithms - logarithms.mean(1, keepdim=True)
