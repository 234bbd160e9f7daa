"""The proof that what was rewritten before a search, and written to a file, is still the user's network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposition import DecompositionError, Inputs, run_model
from decomposition.cost import evaluation_mode
from decomposition.inputs import mapped, rows, split
from decomposition.outputs import leaves
from rankrl.device import model_device
from rankrl.export import ExportError
from rankrl.export.feeds import ONLY_INPUT, feed_of
from rankrl.export.outputs import output_names
from rankrl.fidelity import COARSE_FLOOR, FLOOR, Array, departure, relative_error
from rankrl.onnx_graph.network import OnnxNetwork

_INPUTS = 4
_FILE_FLOOR = 1e-3
"""The relative error of a file that is always allowed: other kernels, and batch normalisation folded."""


def check_rewritten(model: nn.Module, dense: nn.Module, file: Path, inputs: Inputs) -> None:
    """Refuse a network that would be compressed as something else than it is.

    Four inputs are sent through the user's network, through the copy that layers were rewritten in, and
    through the file of that. How far they may differ is seen by running the first in smaller batches, too.

    Args:
        model: The user's network.
        dense: What is about to be compressed.
        file: That as an ONNX file.
        inputs: Inputs of both, on the CPU.

    Raises:
        DecompositionError: The copy computes something else; the module is named whose output is the first to
            differ.
        ExportError: Its file does.
    """
    some = rows(inputs, slice(_INPUTS))
    known = _outputs(model, some)
    parts = [_outputs(model, each) for each in split(some, _INPUTS // 2)]
    again = [_joined(each) for each in zip(*(part.values() for part in parts), strict=True)]
    again = [each if each.shape == y.shape else y for each, y in zip(again, known.values(), strict=True)]
    name, names, whole = type(model).__name__, output_names(list(known)), list(known.values())
    half = any(each.dtype in (torch.float16, torch.bfloat16) for each in model.parameters())
    floor = COARSE_FLOOR if half else FLOOR
    told = departure(names, whole, again, list(_outputs(dense, some).values()), floor=floor)
    if told is not None:
        layer = _first_departing(model, dense, some, floor)
        where = "" if layer is None else f", first of all that of the layer {layer!r}"
        raise DecompositionError(
            f"{name} would be compressed as another network than it is: with nothing compressed yet, "
            f"{told}{where}. Leave that layer as it is (skip), or write it with layers of torch"
        )
    feed = feed_of(dense, some)
    found = OnnxNetwork.load(file).session().run({ONLY_INPUT: feed} if isinstance(feed, np.ndarray) else feed)
    told = departure(names, whole, again, found, floor=max(floor, _FILE_FLOOR))
    if told is not None:
        raise ExportError(
            f"the ONNX file of {name} is another network, with nothing compressed yet: {told}. Write what "
            "depends on values or sizes without Python's own control flow"
        )


def _outputs(network: nn.Module, inputs: Inputs) -> dict[Any, Array]:
    """Return all tensors that a network returns as arrays, by their places."""
    device = model_device(network)
    with evaluation_mode(network):
        output = run_model(network, mapped(lambda x: x.to(device), inputs))
    return {place: _array(y) for place, y in leaves(output) if isinstance(y, Tensor)}


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts[0].ndim else parts[0]


def _array(x: Tensor) -> Array:
    array: Array = (x.float() if x.is_floating_point() else x).detach().cpu().numpy()
    return array


def _first_departing(model: nn.Module, dense: nn.Module, inputs: Inputs, floor: float) -> str | None:
    """Return the name of the module of both networks whose first output is the first to differ."""
    with _watched(model) as before, _watched(dense) as after:
        for network in (model, dense):
            _outputs(network, inputs)
    shared = [name for name in before if name in after]
    return next((name for name in shared if not relative_error(before[name], after[name]) <= floor), None)


@contextmanager
def _watched(network: nn.Module) -> Iterator[dict[str, Array]]:
    """Collect what modules return first, in the order in which they end; the network itself left out."""
    seen: dict[str, Array] = {}

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(name, _array(output))

        return note

    handles = [each.register_forward_hook(hook(name)) for name, each in network.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
