"""Checks that a model takes its inputs, before anything is done with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from decomposition.calibration.calibration_set import CalibrationInputs, calibration_batches
from decomposition.errors import DecompositionError
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, count_inputs, described, mapped, rows, run_model, tensors_of
from decomposition.network.outputs import tensors_in

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_TRIED = 64  # inputs with gaps that are run at once


def checked_batches(
    calibration: CalibrationInputs, model: nn.Module, layers: Collection[str] = ()
) -> list[Inputs]:
    """Return a calibration set as a list of batches that a model takes."""
    batches = accepted(model, calibration_batches(calibration, model))
    if sum(map(count_inputs, batches)) == 0:
        shapes = ", ".join(str(tuple(tensor.shape)) for batch in batches[:1] for tensor in tensors_of(batch))
        raise DecompositionError(
            f"the calibration set is empty (shape {shapes or '()'}); pass a few hundred model inputs"
        )
    for batch in batches:
        check_finite(model, batch, layers)
    return batches


def accepted(
    model: nn.Module,
    batches: Sequence[Inputs],
    what: str = "the calibration set",
    *,
    device: torch.device | None = None,
) -> list[Inputs]:
    """Return batches in the form that a model takes, after running it on the first two inputs."""
    if not batches or count_inputs(batches[0]) == 0:
        return list(batches)

    if any(x.is_meta for x in tensors_of(batches[0])):
        raise DecompositionError(f"{what}: inputs on the meta device hold no numbers; give real ones")

    def on_device(inputs: Inputs) -> Inputs:
        return inputs if device is None else mapped(lambda x: x.to(device), inputs)

    few = on_device(rows(batches[0], slice(2)))
    error = _failure(model, few)
    if error is None:
        return list(batches)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(own) if x.is_floating_point() else x

    for change in (cast, _in_order, lambda x: cast(_in_order(x))):
        if _failure(model, mapped(change, few)) is None:
            return [mapped(change, batch) for batch in batches]
    whole = on_device(batches[0])
    if _failure(model, whole) is None:  # it takes batches of this size alone
        return list(batches)
    raise refusal(model, whole, error, what) from error


def refusal(
    model: nn.Module, inputs: Inputs, error: Exception, what: str = "the calibration set"
) -> DecompositionError:
    """The error for inputs that a model fails on: where it fails, what it takes there, and what to do."""
    few = rows(inputs, slice(2))
    where = _failing_layer(model, few) or _failing_layer(model, inputs)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    remedy = _remedy(model, inputs)
    return DecompositionError(
        f"{what}: the model fails on inputs of {described(inputs)}{where}; {remedy} ({reason})"
    )


def gaps(inputs: Inputs) -> torch.Tensor:
    """Return the positions of the inputs of a batch that hold NaN or an infinity, int64."""
    has_gap = torch.zeros(count_inputs(inputs), dtype=torch.bool)
    for tensor in tensors_of(inputs):
        if tensor.is_floating_point() or tensor.is_complex():
            has_gap |= (
                ~torch.isfinite(tensor).flatten(1).all(1).cpu()
                if tensor.ndim > 1
                else ~torch.isfinite(tensor).cpu()
            )
    return has_gap.nonzero().flatten()


def check_finite(
    model: nn.Module,
    inputs: Inputs,
    layers: Collection[str],
    what: str = "the calibration set",
    *,
    device: torch.device | None = None,
) -> None:
    """Refuse inputs with NaN or infinite values, unless the model masks them."""
    positions = gaps(inputs)
    if not len(positions):
        return
    tried = rows(inputs, positions[:_TRIED].to(tensors_of(inputs)[0].device))
    if device is not None:
        tried = mapped(lambda x: x.to(device), tried)
    seeing: dict[str, None] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if not all(_finite(x) for x in tensors_in(args)):
                seeing[name] = None

        return hook

    modules = dict(model.named_modules())
    watched = [name for name in layers if name in modules]
    handles = [modules[name].register_forward_pre_hook(watch(name)) for name in watched]
    try:
        with evaluation_mode(model):
            masked = all(map(_finite, tensors_in(run_model(model, tried))))
    finally:
        for handle in handles:
            handle.remove()
    number = f"{len(positions)} of {count_inputs(inputs)} inputs" if len(positions) > 1 else "an input"
    holds = f"{what} holds NaN or infinite values in {number}, first in number {int(positions[0])} (from 0)"
    if not masked or seeing:
        raise DecompositionError(f"{holds}{remedy_for_gaps(seeing, masked=masked)}")


def remedy_for_gaps(seeing: Iterable[str], *, masked: bool) -> str:
    """Return what to do about NaN or infinite values: the end of a message that says where they are."""
    if not masked:
        return "; leave such inputs out, or check how they are normalised"
    return (
        ". The model masks them, but cannot be fitted where it sees them: leave these layers as they are, "
        f"skip=[{', '.join(map(repr, seeing))}], or fill the gaps"
    )


def _finite(x: torch.Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _failure(model: nn.Module, inputs: Inputs) -> Exception | None:
    """Return what a model raises on inputs, or an error if its first layer takes the batch for one input."""

    def check(layer: nn.Module, args: tuple[Any, ...]) -> None:
        single = isinstance(layer, _CONVOLUTIONS) and args and args[0].ndim == layer.weight.ndim - 1
        if single and any(args[0].shape == tensor.shape for tensor in tensors_of(inputs)):
            raise DecompositionError("it takes the batch for a single input without a batch axis")

    layers = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    handles = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        with evaluation_mode(model):
            run_model(model, inputs)
    except Exception as error:  # whatever the model's own code raises
        return error
    finally:
        for handle in handles:
            handle.remove()
    return None


def _remedy(model: nn.Module, inputs: Inputs) -> str:
    """Try what the model takes instead, and return the advice."""
    few = rows(inputs, slice(2))
    whole = [x for x in tensors_of(inputs) if not (x.is_floating_point() or x.is_complex())]

    def runs(change: Callable[[torch.Tensor], torch.Tensor], of: Inputs) -> bool:
        return _failure(model, mapped(change, of)) is None

    if whole and runs(_as_float, few):
        scale = " / 255" if all(x.dtype == torch.uint8 for x in whole) else ""
        return f"give numbers in floating point, x.float(){scale}, normalised as the model was trained"
    if runs(lambda x: x[None], inputs):
        return "each is one input without a batch axis: give torch.stack(inputs), or x[None] of a single one"
    if all(x.ndim > 2 for x in tensors_of(few)) and runs(lambda x: x.movedim(-1, 1), few):
        return "their channels are on the last axis: give x.movedim(-1, 1)"
    return "pass inputs that it takes"


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the usual order of memory, even if a single channel makes its strides ambiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def _as_float(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_floating_point() else x.float()


def _failing_layer(model: nn.Module, inputs: Inputs) -> str:
    """Return the layer within which a model fails and what it takes, for a message."""
    running: list[tuple[str, nn.Module, str]] = []

    def begin(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            tensors = [f"{tuple(x.shape)} in {_name(x)}" for x in tensors_in(args)]
            running.append((name, layer, ", ".join(tensors)))

        return hook

    def end(*_: object) -> None:
        running.pop()

    handles = []
    for name, layer in model.named_modules():
        if name:
            handles += [layer.register_forward_pre_hook(begin(name)), layer.register_forward_hook(end)]
    try:
        with evaluation_mode(model):
            run_model(model, inputs)
    except Exception:  # as before; it is known
        if running:
            name, layer, got = running[-1]
            takes = _taken(layer)
            told = f" takes {takes}, but gets {got}" if takes else f" gets {got}"
            return f": layer {name!r} ({type(layer).__name__}){told}"
    finally:
        for handle in handles:
            handle.remove()
    return ""


def _taken(layer: nn.Module) -> str:
    """Return what one of torch's layers takes, or nothing if that is not known."""
    kind = next((f" in {_name(p)}" for p in layer.parameters() if p.is_floating_point()), "")
    if isinstance(layer, nn.Embedding):
        return f"whole numbers from 0 to {layer.num_embeddings - 1}"
    if isinstance(layer, nn.Linear):
        return f"{layer.in_features} numbers on the last axis{kind}"
    for attribute in ("in_channels", "num_features", "num_channels"):
        channels = getattr(layer, attribute, None)
        if isinstance(channels, int):
            return f"{channels} channels on axis 1{kind}"
    return ""


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
