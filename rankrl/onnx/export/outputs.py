"""The outputs of an ONNX file: the tensors that a network returns, by the names that it gives them."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from decomposition.network.inputs import Place, leaves
from rankrl.onnx.errors import ExportError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass
class FileOutputs:
    """What a file returns of what its network does; known once the network has run."""

    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def output_names(places: Sequence[Place]) -> list[str]:
    """Return what a file calls its outputs."""
    names = ["_".join(map(str, place)) for place in places]
    if len(set(names)) == len(names) and all(map(_NAME.fullmatch, names)):
        return names
    return ["output"] if len(names) == 1 else [f"output_{index}" for index in range(len(names))]


def return_tensors_alone(network: nn.Module) -> FileOutputs:
    """Let a network return nothing but the tensors in its output, as the outputs of a file can be."""
    outputs = FileOutputs()

    def reduce(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        parts = list(leaves(output))
        tensors = [(place, leaf) for place, leaf in parts if isinstance(leaf, Tensor)]
        if not tensors:
            raise ExportError(f"{type(module).__name__} returns no tensor, but a {type(output).__name__}")
        others = {  # of a size, which is a tuple of numbers, the first
            place[:1]: f"{place[0] if place else 'itself'} ({type(leaf).__name__})"
            for place, leaf in reversed(parts)
            if leaf is not None and not isinstance(leaf, Tensor)
        }
        outputs.left_out = list(others.values())[::-1]
        outputs.names = output_names([place for place, _ in tensors])
        seen = {id(leaf) for _, leaf in leaves((arguments, keywords))}
        returned = []
        for _, tensor in tensors:  # a file's output has one name: twice the same, or an input, is copied
            returned.append(tensor.clone() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return tuple(returned) if len(returned) > 1 else returned[0]

    network.register_forward_hook(reduce, with_kwargs=True)
    return outputs


@functools.cache
def say_left_out(model: str, others: tuple[str, ...]) -> None:
    """Warn of outputs that a file does not have, once: a budget in time exports a network many times."""
    if others:
        log.warning("the ONNX file of %s returns tensors alone, not %s", model, ", ".join(others))
