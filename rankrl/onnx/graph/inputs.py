"""Read, check and split the inputs of an ONNX file: arrays, files of arrays, folders of images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from rankrl.data.imagefolder import SUFFIXES, decode_images, image_files
from rankrl.data.sample import is_number_of_inputs
from rankrl.errors import OnnxGraphError
from rankrl.onnx.graph.batch_axes import Axes, BatchAxes, GraphInput
from rankrl.onnx.graph.batch_trials import check_sizes, find_batch_axes
from rankrl.onnx.graph.network import Feed, OnnxNetwork
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
        """Return height and width of the inputs."""
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
        """Return pixels (N, H, W, channels) as float32, normalised."""
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
    """Batches of inputs."""

    axes: BatchAxes
    calibration: list[Feed]
    heldout: list[Feed]
    scored: list[Feed]


def read_inputs(
    path: str | Path, network: OnnxNetwork, images: ImagePreprocessing | None = None
) -> dict[str, Array]:
    """Read inputs from a file or from a folder of images."""
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
    """Check inputs and split them."""
    if not (0 < heldout < 1 or is_number_of_inputs(heldout)):
        raise OnnxGraphError(
            f"heldout is {heldout}; it is a share of the inputs, between 0 and 1, or a number of inputs"
        )
    if heldout < 1 and not heldout + scored < 1:
        raise OnnxGraphError(
            f"heldout is {heldout}, and as many inputs are to score plans on, which leaves none to fit to; "
            "give a share below 0.5"
        )
    if batch < 1:
        raise OnnxGraphError(f"batch is {batch}; it must be at least 1")
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
    count: int,
    unit: int,
    heldout: float,
    scored: float,
    network: OnnxNetwork,
    generator: np.random.Generator,
) -> tuple[Array, Array, Array]:
    """Draw the indices of inputs that are fitted to, held out and scored on, `unit` of each at least."""
    _check_enough(count, (2 + bool(scored)) * unit, network)
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


def _check_enough(count: int, least: int, network: OnnxNetwork) -> None:
    if count < least:
        raise OnnxGraphError(
            f"{count} inputs are too few: {network.source} needs at least {least}, to fit to some and "
            "compare on others; a few hundred are better"
        )


def _only(network: OnnxNetwork) -> GraphInput:
    if len(network.inputs) != 1:
        raise OnnxGraphError(
            f"{network.source} takes {_listed(network.inputs)}; give one array for each by its name"
        )
    return network.inputs[0]


def _listed(inputs: Sequence[GraphInput]) -> str:
    return ", ".join(map(str, inputs))
