"""Finding which axes count the inputs of a batch, and which sizes it may have, by trying what is suggested.

Of the axes that a file and its inputs suggest (`axis_suggestions`) the first are taken with which the file
runs, and with which an output grows as the batch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankrl.onnx_graph.axis_suggestions import Axes, Shape, declared_batch, suggested_axes
from rankrl.onnx_graph.batch_axes import BatchAxes, shown_axes
from rankrl.onnx_graph.errors import OnnxGraphError
from rankrl.onnx_graph.network import Feed, GraphSession, OnnxNetwork

_DIFFERENT = (1, 2)
"""Batch sizes at which a file runs that is taken to run at any."""
_FURTHER = (32, 16, 8, 4)
"""Sizes that are tried where it does not, after the user's own."""
_LARGEST = 256
"""The largest size that is tried: users may give all of their inputs as one array."""


def find_batch_axes(network: OnnxNetwork, feed: Feed, stated: Axes | None = None) -> BatchAxes:
    """Return the axes that count the inputs of a batch, and the only batch size if there is one.

    Args:
        network: The network.
        feed: A batch of inputs of the user's own size; its ranks are those of the file.
        stated: The axes that the user states; the others are guessed.

    Raises:
        OnnxGraphError: What is stated does not fit the file, inputs differ in their number, or the file runs
            at none of the sizes that were tried.
    """
    stated = _checked(stated or {}, network)
    session, trials = network.session(), []
    for inputs in suggested_axes(network.inputs, stated, {name: value.shape for name, value in feed.items()}):
        axes = BatchAxes(inputs, fixed=declared_batch(network.inputs, inputs))
        check_sizes(feed, axes, network)
        if axes.size(feed) == 0:
            return axes
        trials.append(_Trial(session, axes, feed))
        if trials[-1].grows:
            break
    for found in [each.found for each in trials if each.grows] + [each.found for each in trials]:
        if found is not None:
            return found
    first = trials[0]
    raise OnnxGraphError(
        f"{first.error}. It was tried with batches of {', '.join(map(str, first.tried))}, their inputs "
        f"counted on {shown_axes(first.axes.inputs)}; if that is not so, say it (dataset.batch_axes, "
        "batch_axes= in Python; null for an input without such an axis), and give "
        "batches of a size that the file runs at"
    )


class _Trial:
    """Runs of a file under one suggestion.

    Args:
        session: The file.
        axes: The suggestion, with the batch size that the file declares.
        feed: A batch of the user's own size.
    """

    def __init__(self, session: GraphSession, axes: BatchAxes, feed: Feed) -> None:
        self.axes, self.error = axes, ""
        self._session, self._feed, self._own = session, feed, axes.size(feed)
        self._shapes: dict[int, list[Shape] | None] = {}
        self.found = self._found()

    @property
    def tried(self) -> list[int]:
        """The batch sizes that were tried."""
        return list(self._shapes)

    @property
    def grows(self) -> bool:
        """Whether it runs, and an output counts the inputs."""
        return self.found is not None and any(axis is not None for axis in self.found.outputs.values())

    def _found(self) -> BatchAxes | None:
        counted = any(axis is not None for axis in self.axes.inputs.values())
        sizes: Sequence[int] = (self.axes.fixed or 1,)
        if self.axes.fixed is None and counted:
            shapes = [found for size in _DIFFERENT if (found := self._run(size)) is not None]
            if len(shapes) == len(_DIFFERENT):
                return self._with_outputs([_growing(*pair) for pair in zip(*shapes, strict=True)], None)
            own = (self._own,) if self._own <= _LARGEST else ()
            sizes = (*own, *_DIFFERENT, *_FURTHER)
        for size in sizes:
            found = self._run(size)
            if found is not None:
                return self._with_outputs([_counting(shape, size) for shape in found], size)
        return None

    def _with_outputs(self, outputs: Sequence[int | None], fixed: int | None) -> BatchAxes:
        return BatchAxes(self.axes.inputs, dict(zip(self._session.output_names, outputs, strict=True)), fixed)

    def _run(self, size: int) -> list[Shape] | None:
        """Return the shapes of the outputs, or None where the file fails."""
        if size not in self._shapes:
            feed = self.axes.rows(self._feed, np.arange(size) % self._own)
            try:
                self._shapes[size] = [np.shape(each) for each in self._session.run(feed, quiet=True)]
            except OnnxGraphError as error:
                self._shapes[size], self.error = None, self.error or str(error)
        return self._shapes[size]


def _growing(one: Shape, two: Shape) -> int | None:
    """Return the axis that is twice as long for twice as many inputs."""
    if len(one) != len(two):
        return None
    return next((axis for axis, size in enumerate(one) if 0 < size != two[axis] == 2 * size), None)


def _counting(shape: Shape, batch: int) -> int | None:
    """Return the axis that counts the inputs of a batch of the only size, the first if it can be."""
    if shape and (shape[0] == batch or (batch > 1 and shape[0] and shape[0] % batch == 0)):
        return 0
    return next((axis for axis, size in enumerate(shape) if size == batch), None)


def check_sizes(feed: Feed, axes: BatchAxes, network: OnnxNetwork) -> None:
    """Refuse a batch whose sizes are not those of the file, or that counts different numbers of inputs.

    Raises:
        OnnxGraphError: One does not fit.
    """
    for wanted in network.inputs:
        shape, counting = feed[wanted.name].shape, axes.inputs[wanted.name]
        for axis, (size, other) in enumerate(zip(wanted.shape, shape, strict=True)):
            if size not in (None, other) and axis != counting:
                raise OnnxGraphError(
                    f"the input {wanted.name!r} has the shape {shape}, but {network.source} takes {wanted}: "
                    f"axis {axis} must have the size {size}, unless it counts the inputs, which "
                    f"batch_axes={{{wanted.name}: {axis}}} says"
                )
    axes.check(feed)


def _checked(stated: Axes, network: OnnxNetwork) -> dict[str, int | None]:
    """Return stated axes counted from the front."""
    inputs = {each.name: each for each in network.inputs}
    found: dict[str, int | None] = {}
    for name, axis in stated.items():
        if name not in inputs:
            raise OnnxGraphError(
                f"batch_axes names the input {name!r}, but {network.source} takes "
                f"{', '.join(map(str, network.inputs))}; name one of them"
            )
        rank = len(inputs[name].shape)
        if axis is not None and (
            isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank
        ):
            raise OnnxGraphError(
                f"batch_axes says {axis!r} of {inputs[name]}; give one of its {rank} axes, counted from 0, "
                "or null (None) if none counts the inputs of a batch"
            )
        found[name] = axis if axis is None else axis % rank
    return found
