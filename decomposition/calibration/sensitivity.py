"""How strongly the network's output reacts to each layer's output: the other half of fitting to the data.

An error e in a layer's output changes the network's output y by J e. To second order the loss grows with
E|J e|^2 = tr(G E[e e']), G = E[J' J] summed over positions: the Gauss-Newton matrix of a squared error on
the network's outputs, and the factor that K-FAC (Martens & Grosse, ICML 2015) calls the pre-activation
statistics. G is estimated without labels, by sending random directions v ~ N(0, I) backwards:
E[J' v v' J] = E[J' J].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.calibration.input_check import checked_batches
from decomposition.calibration.metric import gram, shrunk_matrix
from decomposition.calibration.shrinkage import Spread
from decomposition.errors import DecompositionError
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import (
    Inputs,
    count_inputs,
    mapped,
    numbers_in_one,
    run_model,
    split,
    tensors_of,
)
from decomposition.network.layers import LayerSpec
from decomposition.network.outputs import tensors_in
from decomposition.network.patches import labels_of_batch
from decomposition.network.wrappers import unwrapped

# Inputs in a batch, and numbers in them: a backward pass holds all activations of its batch.
_BATCH = 64
_ELEMENTS = 2**20
_SUM_TOLERANCE, _LEAST_PROBABILITY = 1e-2, 1e-12
"""How far class probabilities are off 1 together, rounded as they are, and the least that is told from 0."""


def collect_sensitivities(
    model: nn.Module,
    specs: Sequence[LayerSpec],
    calibration: CalibrationInputs,
    *,
    seed: int = 0,
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
        (`decomposition.calibration`). Layers that the output does not depend on, or whose gradient is not
        finite, are left out.

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
    current: list[Inputs] = []  # the batch that is sent through

    def watch(name: str, linear: bool) -> torch.utils.hooks.RemovableHandle:
        def add(gradient: torch.Tensor) -> None:
            axis = len(gradient)
            rows = (gradient if linear else gradient.movedim(1, -1)).flatten(0, -2).float()
            sums[name] = sums.get(name, torch.zeros(())) + gram(rows).double().cpu()
            labels = torch.arange(len(rows), device=rows.device) // (len(rows) // axis)
            spreads.setdefault(name, Spread()).add(
                rows, labels_of_batch(labels, axis, count_inputs(current[0]))
            )

        def hook(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(add)

        return modules[name].register_forward_hook(hook)

    handles = [watch(spec.name, spec.kind == "linear") for spec in specs]
    # If inputs are integers, gradients come from parameters, some or all of which may be frozen.
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    before = [(parameter.requires_grad, parameter.grad) for parameter in parameters]
    try:
        with evaluation_mode(model), torch.enable_grad():
            for images in batches:
                size = max(1, min(_BATCH, _ELEMENTS // max(1, numbers_in_one(images))))
                for batch in split(images, size):
                    current[:] = [batch]
                    real = all(tensor.is_floating_point() for tensor in tensors_of(batch))
                    for parameter in parameters:  # only gradients of activations are needed
                        parameter.requires_grad_(not real)
                    outputs = run_model(model, mapped(_watched, batch))
                    _send_back(outputs, generator)
                    inputs += count_inputs(batch)
    except RuntimeError as error:
        raise DecompositionError(
            f"no gradient can be sent back through {type(model).__name__} ({str(error).splitlines()[0]}); "
            "use weigh_outputs=False (decomposition.weigh_outputs=false on the command line)"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for parameter, (learnt, gradient) in zip(parameters, before, strict=True):
            parameter.requires_grad_(learnt)
            parameter.grad = gradient
    sensitivities = {name: total / max(1, inputs) for name, total in sums.items()}
    return {
        name: shrunk_matrix(matrix, spreads[name].shrinkage(matrix, 1 / inputs))
        for name, matrix in sensitivities.items()
        if bool(torch.isfinite(matrix).all()) and matrix.diagonal().sum() > 0
    }


def _watched(x: torch.Tensor) -> torch.Tensor:
    """Return an input that gradients are sent back to."""
    return x.detach().requires_grad_(x.is_floating_point())


def _send_back(outputs: object, generator: torch.Generator) -> None:
    """Send a random direction back from every differentiable tensor in a model's output."""
    reached = [_logits(y) for y in tensors_in(outputs) if y.requires_grad]
    directions = [torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y) for y in reached]
    if reached:
        torch.autograd.backward(reached, directions)


def _logits(y: torch.Tensor) -> torch.Tensor:
    """Return the logits of rows of class probabilities, which hardly move where they are near 1."""
    if y.ndim != 2 or y.shape[1] < 2 or bool((y < 0).any()):
        return y
    if float((y.detach().sum(1) - 1).abs().max()) > _SUM_TOLERANCE:
        return y
    logarithms = y.clamp_min(_LEAST_PROBABILITY).log()
    return logarithms - logarithms.mean(1, keepdim=True)
