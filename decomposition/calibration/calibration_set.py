"""Sets of model inputs as users have them: one batch, batches, a loader or a dataset, labelled or not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, IterableDataset, default_collate

from decomposition.errors import DecompositionError
from decomposition.network.inputs import Inputs, Positional, as_inputs, tensors_of

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
    """What the forward of a model takes."""

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
    """Return the batches of a set as they are."""
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
    """Yield the items of a dataset in batches."""
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
    """Return the inputs of a batch, and its labels if it has any; see `calibration_batches`."""
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
    """Return the inputs of a dict, and its labels unless the forward takes an input of that name."""
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
