"""Read, check and split the inputs of an ONNX file: arrays, files of arrays, folders of images.

Their batch axes, and the batch sizes that the file accepts, are found by running it: the first suggestion
(`suggested_axes`) is taken with which the file runs on one input and on two, an output grows with the batch,
and inputs do not change each other's outputs as the steps of a sequence do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from rankrl.data.sample import is_number_of_inputs
from rankrl.data.sources import SUFFIXES, decode_images, image_files
from rankrl.errors import OnnxGraphError
from rankrl.onnx.graph.network import (
    Axes,
    BatchAxes,
    Feed,
    GraphInput,
    GraphSession,
    OnnxNetwork,
    Shape,
    declared_batch,
    shown_axes,
    suggested_axes,
)
from rankrl.onnx.graph_edits import Array

_CHANNELS = (1, 3)  # grey or colour images


@dataclass(frozen=True)
class ImagePreprocessing:
    """How an image file becomes an input: resized, cropped, `(pixel / 255 - mean) / std * scale`.

    The file says nothing of it, and a network that gets other inputs than it was trained on is fitted to
    those: state what it is used with. The order of the axes and the number of channels are the network's own.

    Attributes:
        mean: Taken off each channel, for pixels in [0, 1]; None for 0. ImageNet's is 0.485, 0.456, 0.406.
        std: What each channel is divided by, for pixels in [0, 1]; None for 1. ImageNet's is 0.229, 0.224,
            0.225.
        scale: What the result is multiplied by: 255 for a network that takes pixels from 0 to 255.
        size: Height and width in pixels, where the network leaves them free.
        resize: Length of the shorter side before the central crop; just what the crop needs when omitted.
        order: Order of the channels: `rgb` or `bgr`.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    scale: float = 1.0
    size: int | None = None
    resize: int | None = None
    order: Literal["rgb", "bgr"] = "rgb"

    def read(self, folder: Path, network: OnnxNetwork) -> dict[str, Array]:
        """Read all image files of a folder, and of the folders in it.

        Raises:
            OnnxGraphError: The folder holds no images, the network takes none, or an option does not fit it.
            DataError: A file cannot be decoded.
        """
        entry = self._entry(network)
        files = image_files(folder)
        if not files:
            raise OnnxGraphError(
                f"the folder {folder} holds no image files ({', '.join(sorted(SUFFIXES))}); give a folder of "
                "images, or a .npz or .npy file"
            )
        first = entry.shape[1] in _CHANNELS
        channels = entry.shape[1] if first else entry.shape[3]
        height, width = self._sides(entry, entry.shape[2:] if first else entry.shape[1:3])
        shorter = self.resize or min(height, width)
        pixels = decode_images(files, height, width, shorter, "RGB" if channels == 3 else "L")
        if self.order == "bgr":
            pixels = pixels[..., ::-1]
        values = pixels if entry.dtype == np.uint8 else self._normalised(pixels).astype(entry.dtype)
        return {entry.name: np.ascontiguousarray(values.transpose(0, 3, 1, 2) if first else values)}

    def _entry(self, network: OnnxNetwork) -> GraphInput:
        """Return the input that takes images, having checked what can be checked before files are read."""
        if self.order not in ("rgb", "bgr"):
            raise OnnxGraphError(f"the order of the channels is rgb or bgr, got {self.order!r}")
        entry = network.inputs[0]
        images = len(entry.shape) == 4 and not set(_CHANNELS).isdisjoint((entry.shape[1], entry.shape[3]))
        if len(network.inputs) != 1 or not images or entry.dtype.kind not in "fu":
            raise OnnxGraphError(
                f"{network.source} takes {', '.join(map(str, network.inputs))}, which is not one batch of "
                "images with 1 or 3 channels; give a .npz file with one array for each input"
            )
        plain = self.mean is None and self.std is None and self.scale == 1
        if entry.dtype.kind == "u" and (entry.dtype != np.uint8 or not plain):
            raise OnnxGraphError(
                f"{network.source} takes {entry}, pixels as they are in uint8; leave out mean, std and scale"
            )
        return entry

    def _sides(self, entry: GraphInput, sides: Sequence[int | None]) -> tuple[int, int]:
        for name, value in (("size", self.size), ("resize", self.resize)):
            if value is not None and value < 1:
                raise OnnxGraphError(f"{name} is a number of pixels, at least 1, got {value}")
        height, width = (side or self.size for side in sides)
        if height is None or width is None:
            raise OnnxGraphError(
                f"the network takes {entry}, images of any size; say which (dataset.size=224, or size= in "
                "Python)"
            )
        if self.size is not None and any(side not in (None, self.size) for side in sides):
            raise OnnxGraphError(
                f"the network takes {entry}, images of {height} x {width}, but size is {self.size}; leave "
                "it out"
            )
        if self.resize is not None and self.resize < min(height, width):
            raise OnnxGraphError(
                f"resize is {self.resize}, less than the {min(height, width)} pixels of the crop; give at "
                "least that"
            )
        return height, width

    def _normalised(self, pixels: Array) -> Array:
        channels = pixels.shape[-1]
        values = pixels.astype(np.float32) / 255
        for name, values_by_channel, default in (("mean", self.mean, 0.0), ("std", self.std, 1.0)):
            numbers = np.asarray([default] if values_by_channel is None else values_by_channel, np.float32)
            if numbers.shape not in ((1,), (channels,)) or (name == "std" and not (numbers > 0).all()):
                raise OnnxGraphError(
                    f"{name} is {values_by_channel}; give one number for each of the {channels} channels"
                    + (", greater than 0" if name == "std" else "")
                )
            values = values - numbers if name == "mean" else values / numbers
        return values * np.float32(self.scale)


HELDOUT = 0.2
"""The share of the inputs that results are compared on; nothing is fitted to them."""
BATCH = 32
"""Inputs that are run at a time at most, where the network leaves that free."""
_BATCH_BYTES = 2**22
"""Bytes of a batch: what a network holds of it on the way is a multiple of that."""
Batches = Mapping[str, Array] | Array | Iterable[Feed | Array | Sequence[Feed | Array]]
"""All inputs as arrays, or batches of them; a list of batches is a sequence of its own."""


@dataclass(frozen=True)
class SplitInputs:
    axes: BatchAxes
    calibration: list[Feed]
    heldout: list[Feed]
    scored: list[Feed]


def read_inputs(
    path: str | Path, network: OnnxNetwork, images: ImagePreprocessing | None = None
) -> dict[str, Array]:
    path = Path(path)
    if path.is_dir():
        return (images or ImagePreprocessing()).read(path, network)
    if images is not None:
        raise OnnxGraphError(
            f"{path} is no folder of images, so that there is nothing to resize or normalise"
        )
    if not path.is_file():
        raise OnnxGraphError(
            f"there is no file of inputs at {path}; give a .npz, a .npy or a folder of images"
        )
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            arrays = {"": content}
        else:
            with content:
                arrays = {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        raise OnnxGraphError(
            f"{path} cannot be read as .npz or .npy ({error}); write it with numpy.savez(path, NAME=array), "
            f"one array for each of {_listed(network.inputs)}"
        ) from error
    if len(arrays) == 1 and len(network.inputs) == 1:
        return {network.inputs[0].name: next(iter(arrays.values()))}
    missing = [entry.name for entry in network.inputs if entry.name not in arrays]
    if missing:
        held = ", ".join(repr(name or "an array without a name") for name in arrays)
        raise OnnxGraphError(
            f"{path} holds {held}, but no {missing[0]!r}; {network.source} takes {_listed(network.inputs)}: "
            "give one array for each by its name"
        )
    return {entry.name: arrays[entry.name] for entry in network.inputs}


def split_inputs(
    inputs: Batches,
    network: OnnxNetwork,
    *,
    batch_axes: Axes | None = None,
    heldout: float = HELDOUT,
    scored: float = 0.0,
    batch: int = BATCH,
    seed: int = 0,
) -> SplitInputs:
    if not (0 < heldout < 1 or is_number_of_inputs(heldout)):
        raise OnnxGraphError(
            f"heldout is {heldout}; it is a share of the inputs, between 0 and 1, or a number of inputs"
        )
    if heldout < 1 and not heldout + scored < 1:
        raise OnnxGraphError(
            f"heldout is {heldout}, and as many inputs are to score plans on, which leaves none to fit to; "
            "give a share below 0.5"
        )
    if isinstance(inputs, np.ndarray):
        inputs = {_only(network).name: inputs}
    entries = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    sequences = [[checked(step, network) for step in _steps(steps)] for steps in entries]
    feeds = [feed for sequence in sequences for feed in sequence]
    if not feeds:
        raise OnnxGraphError("there are no inputs; give a few hundred that are like those it will be used on")
    axes = find_batch_axes(network, feeds[0], batch_axes)
    for feed in feeds:
        check_sizes(feed, axes, network)
    size = axes.fixed or min(batch, _within_bytes(feeds[0], axes))
    generator = np.random.default_rng(seed)
    in_steps = any(len(sequence) > 1 for sequence in sequences)
    counted = any(axis is not None for axis in axes.inputs.values())
    if counted and not in_steps and len({axes.kind(feed) for feed in feeds}) == 1:
        whole = axes.joined(feeds)
        shares = _shares(axes.size(whole), axes.fixed or 1, heldout, scored, network, generator)
        return SplitInputs(axes, *(list(_batches(axes.rows(whole, index), axes, size)) for index in shares))
    parts = [
        [
            part
            for index in sorted(indices)
            for feed in sequences[index]
            for part in _batches(feed, axes, size)
        ]
        for indices in _shares(len(sequences), 1, heldout, scored, network, generator)
    ]
    if not all(parts[: 2 + bool(scored)]):
        raise OnnxGraphError(f"{network.source} takes batches of {axes.fixed}; give whole ones")
    return SplitInputs(axes, *parts)


def _steps(batch: Any) -> Sequence[Any]:
    """Return a single batch as a list, or a sequence of batches; other types are refused later."""
    sequence = (
        isinstance(batch, list | tuple)
        and batch
        and all(isinstance(step, Mapping | np.ndarray) for step in batch)
    )
    return batch if sequence else [batch]


def _shares(
    count: int, unit: int, heldout: float, scored: float, network: OnnxNetwork, generator: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Draw the indices of inputs that are fitted to, held out and scored on, `unit` of each at least."""
    least = (2 + bool(scored)) * unit
    if count < least:
        raise OnnxGraphError(
            f"{count} inputs are too few: {network.source} needs at least {least}, to fit to some and "
            "compare on others; a few hundred are better"
        )
    order = generator.permutation(count)
    if heldout >= 1:
        if heldout + scored + unit > count:
            raise OnnxGraphError(
                f"heldout is {heldout}, of {count} inputs{' to score plans on, too' if scored else ''}; give "
                "more inputs, or hold fewer out"
            )
        heldout, scored = heldout / count, scored / count
    tried = min(max(unit, round(scored * count)), count - 2 * unit) if scored else 0
    held = min(max(unit, round(heldout * count)), count - tried - unit)
    return order[held + tried :], order[:held], order[held : held + tried]


def checked(feed: Feed | Any, network: OnnxNetwork) -> dict[str, Array]:
    """Return a batch in the types that the network takes."""
    if isinstance(feed, np.ndarray):
        feed = {_only(network).name: feed}
    if not isinstance(feed, Mapping):
        raise OnnxGraphError(
            f"a batch of inputs is a {type(feed).__name__}; give mappings of input names to arrays"
        )
    names = [entry.name for entry in network.inputs]
    wrong = [name for name in feed if name not in names] + [name for name in names if name not in feed]
    if wrong:
        raise OnnxGraphError(
            f"the inputs given are {', '.join(map(repr, feed)) or 'none'}, but {network.source} takes "
            f"{_listed(network.inputs)}; give one array for each by its name"
        )
    return {entry.name: _fitting(np.asarray(feed[entry.name]), entry, network) for entry in network.inputs}


def _fitting(value: Array, entry: GraphInput, network: OnnxNetwork) -> Array:
    takes = f"{network.source} takes {entry}"
    if value.ndim != len(entry.shape):
        raise OnnxGraphError(
            f"the input {entry.name!r} has the shape {value.shape}, but {takes}: give as many axes as "
            f"that ({len(entry.shape)})"
        )
    if value.dtype == entry.dtype:
        return value
    # Widening loses nothing, and float64 is what numpy makes by itself; anything else may be a mistake.
    both_real = value.dtype.kind == "f" and entry.dtype.kind == "f"
    both_whole = value.dtype.kind in "iu" and entry.dtype.kind in "iu"
    if both_whole and value.size:
        limits = np.iinfo(entry.dtype)
        both_whole = bool(limits.min <= value.min() and value.max() <= limits.max)
    if not (both_real or both_whole):
        raise OnnxGraphError(
            f"the input {entry.name!r} is {value.dtype}, but {takes}: convert it with "
            f".astype(numpy.{entry.dtype}) if that is what it means"
        )
    return value.astype(entry.dtype)


def _within_bytes(feed: Feed, axes: BatchAxes) -> int:
    """Return the batch size for inputs of this size, at least two so that its axis can be recognised."""
    counted = sum(feed[name].nbytes for name, axis in axes.inputs.items() if axis is not None)
    return max(2, _BATCH_BYTES * max(1, axes.size(feed)) // max(1, counted))


def _batches(whole: Feed, axes: BatchAxes, size: int) -> Iterator[Feed]:
    """Cut inputs into batches, with a smaller last one only where the batch size is free."""
    count = axes.size(whole)
    for first in range(0, count, size):
        if axes.fixed is None or first + size <= count:
            yield axes.rows(whole, slice(first, first + size))


def _only(network: OnnxNetwork) -> GraphInput:
    if len(network.inputs) != 1:
        raise OnnxGraphError(
            f"{network.source} takes {_listed(network.inputs)}; give one array for each by its name"
        )
    return network.inputs[0]


def _listed(inputs: Sequence[GraphInput]) -> str:
    return ", ".join(map(str, inputs))


INFLUENCE = 0.02
"""How far an input may change another one's outputs, relative to them: more than rounding does."""
_FURTHER = (32, 16, 8, 4)
"""Sizes that are tried where a file does not run at 1 and 2, after the user's own."""
_LARGEST = 256
"""The largest size that is tried: users may give all of their inputs as one array."""


def find_batch_axes(network: OnnxNetwork, feed: Feed, stated: Axes | None = None) -> BatchAxes:
    """Return the axes that count the inputs of a batch, and the only batch size if there is one."""
    stated = _stated_axes(stated or {}, network)
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


def _stated_axes(stated: Axes, network: OnnxNetwork) -> dict[str, int | None]:
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
