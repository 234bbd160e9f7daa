"""Find the batch axes of a file, and the batch sizes that it accepts, by running it.

The first suggestion (`suggested_axes`) is taken with which the file runs on one input and on two, an output
grows with the batch, and inputs do not change each other's outputs as the steps of a sequence do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rankrl.errors import OnnxGraphError
from rankrl.onnx.graph.batch_axes import Axes, BatchAxes, Shape, declared_batch, shown_axes, suggested_axes
from rankrl.onnx.graph.network import Feed, GraphSession, OnnxNetwork
from rankrl.onnx.graph_edits import Array

INFLUENCE = 0.02
"""How far an input may change another one's outputs, relative to them: more than rounding does."""
_FURTHER = (32, 16, 8, 4)
"""Sizes that are tried where a file does not run at 1 and 2, after the user's own."""
_LARGEST = 256
"""The largest size that is tried: users may give all of their inputs as one array."""


def find_batch_axes(network: OnnxNetwork, feed: Feed, stated: Axes | None = None) -> BatchAxes:
    """Return the axes that count the inputs of a batch, and the only batch size if there is one."""
    stated = _checked(stated or {}, network)
    trusted = len(stated) == len(network.inputs) or any(axis is not None for axis in stated.values())
    # Integers whose scale is taken from a whole batch change its inputs' outputs a little, whatever they are.
    scaled = any(node.op_type == "DynamicQuantizeLinear" for node in network.model.graph)
    tolerance = math.inf if scaled else INFLUENCE
    session, trials = network.session(), []
    for inputs in suggested_axes(network.inputs, stated, {name: value.shape for name, value in feed.items()}):
        axes = BatchAxes(inputs, fixed=declared_batch(network.inputs, inputs))
        check_sizes(feed, axes, network)
        if axes.size(feed) == 0:
            return axes
        trial = _Trial(session, axes, feed)
        independent = trial.grows and trial.influence <= tolerance
        if trial.result is not None and (trusted or (independent and trial.result.fixed is None)):
            return trial.result
        trials.append(trial)
    for trial in trials:
        if trial.influence > tolerance:
            nothing = shown_axes(dict.fromkeys(trial.axes.inputs))
            raise OnnxGraphError(
                f"{network.source} counts no independent inputs on {shown_axes(trial.axes.inputs)}: the "
                f"second one's outputs are {trial.influence:.0%} off what they are alone, as those of steps "
                f"are. State the axes (dataset.batch_axes, batch_axes= in Python): {nothing} if they are the "
                "steps of a sequence, so that every batch is one input and run as it is; or those above"
            )
    for trial in sorted(trials, key=lambda trial: not trial.grows):
        if trial.result is not None:
            return trial.result
    first = trials[0]
    raise OnnxGraphError(
        f"{first.error}. It was tried with batches of {', '.join(map(str, first.tried))}, their inputs "
        f"counted on {shown_axes(first.axes.inputs)}; if that is not so, say it (dataset.batch_axes, "
        "batch_axes= in Python; null for an input without such an axis), and give "
        "batches of a size that the file runs at"
    )


class _Trial:
    """Runs of a file under one suggestion."""

    def __init__(self, session: GraphSession, axes: BatchAxes, feed: Feed) -> None:
        self.axes, self.error, self.influence = axes, "", 0.0
        self._session, self._feed, self._own = session, feed, axes.size(feed)
        self._outputs: dict[int, list[Array] | None] = {}
        self.result = self._result()

    @property
    def tried(self) -> list[int]:
        """The batch sizes that were tried."""
        return list(self._outputs)

    @property
    def grows(self) -> bool:
        """Whether the file runs and an output grows with the batch."""
        return self.result is not None and any(axis is not None for axis in self.result.outputs.values())

    def _result(self) -> BatchAxes | None:
        counted = any(axis is not None for axis in self.axes.inputs.values())
        sizes: Sequence[int] = (self.axes.fixed or 1,)
        if self.axes.fixed is None and counted:
            one, two = self._run([1]), self._run([0, 1])
            if one is not None and two is not None:
                axes = [_growing(*pair) for pair in zip(one, two, strict=True)]
                self.influence = max(map(_influence, one, two, axes), default=0.0)
                if self.influence > INFLUENCE and not self._repeats(two):
                    self.influence = 0.0  # random numbers of its own hide it
                return self._with_outputs(axes, None)
            own = (self._own,) if self._own <= _LARGEST else ()
            sizes = (*own, 1, 2, *_FURTHER)
        for size in sizes:
            outputs = self._run(range(size))
            if outputs is not None:
                return self._with_outputs([_counting(np.shape(output), size) for output in outputs], size)
        return None

    def _with_outputs(self, outputs: Sequence[int | None], fixed: int | None) -> BatchAxes:
        return BatchAxes(self.axes.inputs, dict(zip(self._session.output_names, outputs, strict=True)), fixed)

    def _repeats(self, outputs: Sequence[Array]) -> bool:
        """Tell whether two inputs get these outputs a second time."""
        again = self._session.run(self.axes.rows(self._feed, np.array([0, 1]) % self._own), quiet=True)
        pairs = [pair for pair in zip(outputs, again, strict=True) if pair[0].dtype.kind == "f"]
        return all(np.array_equal(*pair, equal_nan=True) for pair in pairs)

    def _run(self, rows: Sequence[int]) -> list[Array] | None:
        """Return the outputs for some inputs, or None where the file fails; each size is tried once."""
        size = len(rows)
        if size not in self._outputs:
            feed = self.axes.rows(self._feed, np.asarray(rows) % self._own)
            try:
                self._outputs[size] = self._session.run(feed, quiet=True)
            except OnnxGraphError as error:
                self._outputs[size], self.error = None, self.error or str(error)
        return self._outputs[size]


def _growing(one: Array, two: Array) -> int | None:
    """Return the axis that is twice as long for twice as many inputs."""
    if np.ndim(one) != np.ndim(two):
        return None
    sizes = zip(np.shape(one), np.shape(two), strict=True)
    return next((axis for axis, (size, twice) in enumerate(sizes) if 0 < size != twice == 2 * size), None)


def _influence(alone: Array, pair: Array, axis: int | None) -> float:
    """Return the relative difference between an input's output in a pair and its output alone."""
    if axis is None or alone.dtype.kind != "f" or not alone.any():
        return 0.0
    expected, both = (np.moveaxis(output, axis, 0).astype(np.float64) for output in (alone, pair))
    if expected.shape[1:] != both.shape[1:]:
        return 0.0
    differences = [np.linalg.norm(output - expected) for output in (both[len(expected) :], both[1::2])]
    return float(min(differences) / np.linalg.norm(expected))


def _counting(shape: Shape, batch: int) -> int | None:
    """Return the axis whose length is the only batch size, the first axis if possible."""
    if shape and (shape[0] == batch or (batch > 1 and shape[0] and shape[0] % batch == 0)):
        return 0
    return next((axis for axis, size in enumerate(shape) if size == batch), None)


def check_sizes(feed: Feed, axes: BatchAxes, network: OnnxNetwork) -> None:
    """Refuse a batch whose sizes are not those of the file, or that counts different numbers of inputs."""
    for entry in network.inputs:
        shape, counting = feed[entry.name].shape, axes.inputs[entry.name]
        for axis, (size, other) in enumerate(zip(entry.shape, shape, strict=True)):
            if size not in (None, other) and axis != counting:
                raise OnnxGraphError(
                    f"the input {entry.name!r} has the shape {shape}, but {network.source} takes "
                    f"{entry}: axis {axis} must have the size {size}, unless it counts the inputs, which "
                    f"batch_axes={{{entry.name}: {axis}}} says"
                )
    axes.check(feed)


def _checked(stated: Axes, network: OnnxNetwork) -> dict[str, int | None]:
    """Check stated axes and return them counted from the front."""
    inputs = {entry.name: entry for entry in network.inputs}
    axes: dict[str, int | None] = {}
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
        axes[name] = axis if axis is None else axis % rank
    return axes
