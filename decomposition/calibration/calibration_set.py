"""Read calibration inputs into batches, and check that the network accepts them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, IterableDataset, default_collate

from decomposition.errors import DecompositionError
from decomposition.network.cost import watching
from decomposition.network.inputs import (
    Inputs,
    Positional,
    as_inputs,
    count_inputs,
    described,
    mapped,
    rows,
    run_model,
    tensors_in,
    tensors_of,
)

CalibrationInputs = torch.Tensor | Mapping[str, torch.Tensor] | Iterable[Any] | Dataset[Any]
"""Model inputs: one batch (a tensor, a tuple or a dict of tensors), batches, such as a data loader, or a
dataset."""

LABELS = ("labels", "label", "targets", "target")
"""Names of labels in a dict of inputs, unless the model takes an input of that name."""

_BATCH = 64  # items of a dataset in a batch


def calibration_batches(calibration: CalibrationInputs, model: nn.Module | None = None) -> list[Inputs]:
    """Return a calibration set as a list of batches without labels."""
    return [inputs for inputs, _ in labelled_batches(calibration, model)]


def labelled_batches(
    data: CalibrationInputs, model: nn.Module | None = None
) -> list[tuple[Inputs, Any | None]]:
    """Return a set of inputs as a list of batches, each with its labels, or `None` where it has none."""
    forward = _Forward.of(model)
    batches = [_parted(batch, forward) for batch in _batches(data, forward)]
    for batch, _ in batches:
        shapes, first = (
            [tuple(x.shape[1:]) for x in tensors_of(inputs)] for inputs in (batch, batches[0][0])
        )
        if shapes != first or type(batch) is not type(batches[0][0]):
            raise DecompositionError(
                f"the calibration set holds inputs of the shapes {_listed(first)} and {_listed(shapes)}; "
                "pass inputs of one shape, at which costs are counted too"
            )
    return batches


@dataclass(frozen=True)
class _Forward:
    """Number of positional inputs (least, most) and parameter names of a forward; None allows any name."""

    least: int = 1
    most: float = 1
    names: frozenset[str] | None = None

    @classmethod
    def of(cls, model: nn.Module | None) -> _Forward:
        if model is None:
            return cls()
        try:
            parameters = inspect.signature(model.forward).parameters.values()
        except (TypeError, ValueError):
            return cls()
        kinds = {parameter.kind for parameter in parameters}
        ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        least = sum(p.default is p.empty for p in ordered)
        most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(ordered)
        any_name = inspect.Parameter.VAR_KEYWORD in kinds
        return cls(least, most, None if any_name else frozenset(parameter.name for parameter in parameters))


def _batches(data: Any, forward: _Forward) -> Iterable[Any]:
    """Return the batches of a calibration set as given, labels included."""
    if isinstance(data, torch.Tensor | Mapping | Positional) or _is_one_batch(data, forward):
        return [data]
    if isinstance(data, Dataset):
        return _collated(data)
    if isinstance(data, list | tuple):
        return data
    if (
        not isinstance(data, Iterable)
        or isinstance(data, str | bytes | nn.Module)
        or hasattr(data, "__array__")
    ):
        raise DecompositionError(
            f"model inputs are given as a {type(data).__name__}; pass a tensor, a tuple or dict of tensors, "
            "batches of such (a data loader), or a torch.utils.data.Dataset; torch.as_tensor reads arrays"
        )
    # A loader may fill the same memory again and again.
    return [tree_map_only(torch.Tensor, torch.clone, batch) for batch in data]


def _is_one_batch(data: Any, forward: _Forward) -> bool:
    """Tell whether a tuple or list is inputs, with their labels perhaps, and not batches of inputs."""
    if not isinstance(data, list | tuple) or not data:
        return False
    if isinstance(data, tuple) and forward.least > 1 and _all_tensors(data):
        return True
    if len(data) != 2:
        return False
    first, second = data
    if not isinstance(first, torch.Tensor):
        return isinstance(first, Mapping | list | tuple) and isinstance(second, torch.Tensor)
    if not isinstance(second, torch.Tensor):
        return isinstance(data, tuple) and isinstance(second, Mapping | list | tuple)
    if first.ndim == 0 or second.ndim == 0 or len(first) != len(second):
        return False
    if first.shape != second.shape:
        return isinstance(data, tuple) or (second.ndim == 1 and not second.is_floating_point())
    parts = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()  # x.split(n)
    if isinstance(data, tuple) and not parts:
        raise DecompositionError(
            f"a tuple of two tensors of shape {tuple(first.shape)} may be two batches, two inputs, or inputs "
            "and targets; give a list of batches, a dict of inputs by name, or [(inputs, targets)]"
        )
    return False


def _collated(dataset: Dataset[Any]) -> Iterator[Any]:
    every: Iterable[Any] = (
        dataset if isinstance(dataset, IterableDataset) else map(dataset.__getitem__, _range(dataset))
    )
    items = iter(every)
    while some := list(islice(items, _BATCH)):
        try:
            yield default_collate(some)
        except (TypeError, RuntimeError) as error:
            raise DecompositionError(
                f"the items of the {type(dataset).__name__} cannot be joined into batches "
                f"({str(error).splitlines()[0]}); let it return tensors of one shape "
                "(transform=torchvision.transforms.ToTensor() for images), or give a DataLoader"
            ) from error


def _range(dataset: Dataset[Any]) -> range:
    try:
        return range(len(dataset))  # type: ignore[arg-type]
    except TypeError as error:
        raise DecompositionError(
            f"the {type(dataset).__name__} has no length; give a DataLoader of it, or an IterableDataset"
        ) from error


def _parted(batch: Any, forward: _Forward) -> tuple[Inputs, Any | None]:
    """Split a batch into inputs and labels (None if it has none)."""
    if isinstance(batch, torch.Tensor | Positional):
        return as_inputs(batch), None
    if isinstance(batch, Mapping):
        return _parted_by_name(batch, forward)
    if not isinstance(batch, list | tuple) or not batch:
        raise DecompositionError(
            f"the calibration set holds a {type(batch).__name__}; pass batches of model inputs: tensors, "
            "tuples or dicts of tensors, or pairs of such and labels"
        )
    if len(batch) == 2 and not isinstance(batch[0], torch.Tensor):
        return as_inputs(batch[0]), batch[1]
    inputs = batch[0] if len(batch) == 2 else batch[:-1]
    if (
        not isinstance(batch[-1], torch.Tensor)
        and _all_tensors(batch[:-1])
        and len(batch) - 1 <= forward.most
    ):
        return as_inputs(inputs), batch[-1]
    if len(batch) == forward.most + 1 and _all_tensors(batch):
        return as_inputs(inputs), batch[-1]
    if forward.least <= 1 and len(batch) == 2 and _all_tensors(batch):
        if batch[1].ndim == 1 and not batch[1].is_floating_point():
            return as_inputs(batch[0]), batch[1]
        raise DecompositionError(
            "the calibration set holds pairs of tensors, which may be two inputs of the model or inputs and "
            "labels; pass inputs alone, dicts of inputs by name, or pairs of a tuple of inputs and labels"
        )
    return as_inputs(batch), None


def _parted_by_name(batch: Mapping[str, Any], forward: _Forward) -> tuple[Inputs, Any | None]:
    """Split a dict into inputs and labels; a name that the forward takes is an input."""
    labels = {name: batch[name] for name in LABELS if name in batch and name not in (forward.names or LABELS)}
    inputs = {name: value for name, value in batch.items() if name not in labels}
    if not inputs:
        return as_inputs(batch), None
    unknown = [] if forward.names is None else [name for name in inputs if name not in forward.names]
    if unknown:
        raise DecompositionError(
            f"the model's forward takes {', '.join(sorted(forward.names or ()))}, but not "
            f"{', '.join(map(str, unknown))}; name inputs as it does, and labels {', '.join(LABELS)}"
        )
    return as_inputs(inputs), (labels if len(labels) > 1 else next(iter(labels.values()), None))


def _all_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else ", ".join(map(str, shapes))


_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_TRIED = 64  # inputs with gaps that are run at once


def checked_batches(
    calibration: CalibrationInputs, model: nn.Module, layers: Collection[str] = ()
) -> list[Inputs]:
    """Return a calibration set as batches without labels, checked against the model."""
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
    if _failure(model, whole) is None:  # the model takes batches of this size alone
        return list(batches)
    raise refusal(model, whole, error, what) from error


def refusal(
    model: nn.Module, inputs: Inputs, error: Exception, what: str = "the calibration set"
) -> DecompositionError:
    """Make the error for inputs that a model fails on: the layer, its expected input, and the remedy."""
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
            has_gap |= ~torch.isfinite(tensor).unsqueeze(-1).flatten(1).all(1).cpu()
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
    with watching(model, [modules[name].register_forward_pre_hook(watch(name)) for name in watched]):
        masked = all(map(_finite, tensors_in(run_model(model, tried))))
    number = f"{len(positions)} of {count_inputs(inputs)} inputs" if len(positions) > 1 else "an input"
    holds = f"{what} holds NaN or infinite values in {number}, first in number {int(positions[0])} (from 0)"
    if not masked or seeing:
        raise DecompositionError(f"{holds}{remedy_for_gaps(seeing, masked=masked)}")


def remedy_for_gaps(seeing: Iterable[str], *, masked: bool) -> str:
    """Return the advice on NaN or infinite inputs, as the end of an error message."""
    if not masked:
        return "; leave such inputs out, or check how they are normalised"
    return (
        ". The model masks them, but cannot be fitted where it sees them: leave these layers as they are, "
        f"skip=[{', '.join(map(repr, seeing))}], or fill the gaps"
    )


def _finite(x: torch.Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _failure(model: nn.Module, inputs: Inputs) -> Exception | None:
    """Return the exception of a model on inputs; an error too if a layer takes the batch for one input."""

    def check(layer: nn.Module, args: tuple[Any, ...]) -> None:
        single = isinstance(layer, _CONVOLUTIONS) and args and args[0].ndim == layer.weight.ndim - 1
        if single and any(args[0].shape == tensor.shape for tensor in tensors_of(inputs)):
            raise DecompositionError("it takes the batch for a single input without a batch axis")

    layers = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    try:
        with watching(model, [layer.register_forward_pre_hook(check) for layer in layers]):
            run_model(model, inputs)
    except Exception as error:  # whatever the model's own code raises
        return error
    return None


def _remedy(model: nn.Module, inputs: Inputs) -> str:
    """Try floats, a batch axis and channels first in turn; return advice for the first that runs."""
    few = rows(inputs, slice(2))
    whole = [x for x in tensors_of(inputs) if not (x.is_floating_point() or x.is_complex())]

    def runs(change: Callable[[torch.Tensor], torch.Tensor], of: Inputs) -> bool:
        return _failure(model, mapped(change, of)) is None

    if whole and runs(lambda x: x if x.is_floating_point() else x.float(), few):
        scale = " / 255" if all(x.dtype == torch.uint8 for x in whole) else ""
        return f"give numbers in floating point, x.float(){scale}, normalised as the model was trained"
    if runs(lambda x: x[None], inputs):
        return "each is one input without a batch axis: give torch.stack(inputs), or x[None] of a single one"
    if all(x.ndim > 2 for x in tensors_of(few)) and runs(lambda x: x.movedim(-1, 1), few):
        return "their channels are on the last axis: give x.movedim(-1, 1)"
    return "pass inputs that it takes"


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy; with a single channel, strides alone do not tell the memory format."""
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def _failing_layer(model: nn.Module, inputs: Inputs) -> str:
    """Describe the layer in which a model fails and its expected input, for a message."""
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
        with watching(model, handles):
            run_model(model, inputs)
    except Exception:  # the failure reported already
        if running:
            name, layer, got = running[-1]
            takes = _taken(layer)
            told = f" takes {takes}, but gets {got}" if takes else f" gets {got}"
            return f": layer {name!r} ({type(layer).__name__}){told}"
    return ""


def _taken(layer: nn.Module) -> str:
    """Describe the input of one of torch's layers; empty if it is not known."""
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
