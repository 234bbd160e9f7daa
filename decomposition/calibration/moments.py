"""Collect second moments of layer inputs and sensitivities of outputs; re-estimate batch-norm statistics.

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
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposition.calibration.calibration_set import CalibrationInputs, checked_batches, refusal
from decomposition.calibration.metric import (
    WIDEST,
    Metric,
    RowFactor,
    Spread,
    covariance,
    gram,
    is_finite,
    labels_or_single,
    mean_of,
    most_rows,
    shrunk,
    shrunk_matrix,
    with_mean,
    worth_factoring,
)
from decomposition.calibration.units import Array, find_units, known_answers, output_weight
from decomposition.errors import DecompositionError
from decomposition.memory import check_room
from decomposition.network.cost import evaluation_mode, watching
from decomposition.network.geometry import labels_of_batch, sample_labelled_patches
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
