"""The axes that count the inputs of a batch; batches are cut and joined along them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rankrl.onnx.graph.errors import OnnxGraphError

if TYPE_CHECKING:
    from rankrl.onnx.graph.network import Feed
from rankrl.onnx.graph_edits import Array


@dataclass(frozen=True)
class BatchAxes:
    """The axes that count the inputs of a batch."""

    inputs: Mapping[str, int | None]
    outputs: Mapping[str, int | None] = field(default_factory=dict)
    fixed: int | None = None

    def size(self, feed: Feed) -> int:
        """Return how many inputs a batch holds; one where nothing counts them."""
        return next(
            (int(feed[name].shape[axis]) for name, axis in self.inputs.items() if axis is not None), 1
        )

    def check(self, feed: Feed) -> None:
        """Refuse a batch whose arrays count different numbers of inputs."""
        counts = {name: feed[name].shape[axis] for name, axis in self.inputs.items() if axis is not None}
        if len(set(counts.values())) > 1:
            listed = ", ".join(
                f"{name!r} {count} (axis {self.inputs[name]})" for name, count in counts.items()
            )
            raise OnnxGraphError(
                f"the inputs have different numbers of entries on the axes that count them: {listed}; give "
                "as many of each, or say which axes count them, null for an input that goes with every batch "
                f"as it is: {shown_axes(self.inputs)}"
            )

    def rows(self, feed: Feed, index: slice | Array) -> dict[str, Array]:
        """Return some inputs of a batch."""
        arrays = {}
        for name, value in feed.items():
            axis = self.inputs.get(name)
            arrays[name] = value if axis is None else value[(*[slice(None)] * axis, index)]
        return arrays

    def one(self, feed: Feed) -> Feed:
        """Return the first input of a batch, or the batch where its size is fixed."""
        return feed if self.fixed is not None else self.rows(feed, slice(1))

    def parts(self, feed: Feed, size: int) -> Iterator[Feed]:
        """Cut a batch into smaller ones; it stays whole where its size is fixed."""
        if self.fixed is not None:
            yield feed
            return
        for first in range(0, self.size(feed), size):
            yield self.rows(feed, slice(first, first + size))

    def joined(self, feeds: Sequence[Feed]) -> dict[str, Array]:
        """Return batches of one `kind` as one; a single one is not copied."""
        if len(feeds) == 1:
            return dict(feeds[0])
        return {
            name: feeds[0][name] if axis is None else np.concatenate([feed[name] for feed in feeds], axis)
            for name, axis in self.inputs.items()
        }

    def kind(self, feed: Feed) -> tuple[object, ...]:
        """Return what batches that can be joined share: other sizes, and the values that count no inputs."""
        parts: list[object] = []
        for name, axis in self.inputs.items():
            value = feed[name]
            if axis is None:
                parts.append((value.shape, value.tobytes()))
            else:
                parts.append(value.shape[:axis] + value.shape[axis + 1 :])
        return tuple(parts)

    def first_axis(self, name: str, output: Array) -> Array:
        """Return an output with the axis that counts inputs in front; flat where it counts none."""
        axis = self.outputs.get(name, 0)
        return output.reshape(-1) if axis is None else np.moveaxis(output, axis, 0) if axis else output


def by_input(numbers: Array, count: int) -> Array:
    """Return numbers as rows, one for each input of a batch of so many; shape (count, numbers)."""
    if not numbers.ndim or len(numbers) % count:
        numbers = np.pad(numbers.reshape(-1), (0, -numbers.size % count))
    return numbers.reshape(count, -1)


def shown_axes(axes: Mapping[str, int | None]) -> str:
    """Return axes as the option for them is written on the command line."""
    entries = ", ".join(f"{name}: {'null' if axis is None else axis}" for name, axis in axes.items())
    return f"batch_axes={{{entries}}}"
