"""Every file that `bench_files` can compress, by name or path.

A path is a .onnx file. Its inputs are made by a `prepare_inputs.py` next to it, if that knows the file,
or lie in a .npz of its name, one array for each input, counted on the first axis; scores are
then correlations with the original's outputs.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import torch
from bench_decomposition import load_network
from made_inputs import MissingFileError
from real_files import SOURCES, Array, Outputs, RealFile, Sample, accuracy, correlation, packaged

from rankrl.data import load_dataset
from rankrl.onnx.export import export_onnx

NETWORKS = ("resnet20", "resnet56", "resnet9")
_PREPARED = ("pitch", "file-types", "music")
_TIMES = 10
"""Test images for each input that other files are judged by."""
_BATCH = 50


def names_of_files() -> list[str]:
    """List the names of the files that need no path."""
    return [*SOURCES, *NETWORKS]


def find_file(name: str, counts: tuple[int, int]) -> RealFile:
    """Find a file by name or path, with `counts` inputs that methods see, and that scores are measured on."""
    if name in SOURCES:
        return packaged(name, counts)
    if name in NETWORKS:
        return _network(name, counts)
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
    spec = importlib.util.spec_from_file_location("prepare_inputs", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    case = _cases(module, [path.stem], max(counts[1], 2 * counts[0]))[path.stem]
    name = onnx.load(path, load_external_data=False).graph.input[0].name
    samples = [
        Sample({name: each[:count]}, [None] * min(count, len(each)))
        for each, count in ((case.fitted, counts[0]), (case.tested, len(case.tested)))
    ]
    known = case.score
    if known is None:
        return RealFile(path.stem, path, *samples, correlation, "correlation", correlation)

    def score(outputs: Sequence[Outputs], _: Sequence[Any], originals: Sequence[Outputs]) -> float:
        return known(np.concatenate([each[0] for each in outputs]))

    return RealFile(path.stem, path, *samples, score, "right", correlation)


@dataclass(frozen=True)
class _Case:
    """Inputs that layers are fitted to, others that `score` is measured on (None: the agreement)."""

    fitted: Array
    tested: Array
    score: Callable[[Array], float] | None


def _cases(prepare: ModuleType, names: list[str], count: int) -> dict[str, _Case]:
    """Make the inputs of each network."""
    made = {}
    for name in names:
        generator = np.random.default_rng(0)
        if name == "pitch":
            frames, hz = prepare.pitch_frames(2 * count, generator)
            score = lambda output, hz=hz[count:]: prepare.pitch_score(output, hz)  # noqa: E731
            made[name] = _Case(frames[:count], frames[count:], score)
        elif name == "file-types":
            roots = dict.fromkeys(sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
            data, labels = prepare.file_bytes(2 * count, generator, roots)
            half = len(data) // 2
            score = lambda output, labels=labels[half:]: prepare.label_score(output, labels)  # noqa: E731
            made[name] = _Case(data[:half], data[half:], score)
        elif name == "music":
            audio = prepare.music(max(8, count // 20), generator)
            half = len(audio) // 2
            made[name] = _Case(audio[:half], audio[half:], None)
    return made


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
def _exported(name: str, checkpoint: Path) -> Path:
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / f"{name}.onnx"
    _FOLDERS.append(folder)
    export_onnx(load_network(checkpoint, name), path, (3, 32, 32), progress=False)
    return path


_FOLDERS: list[Any] = []
"""Folders of exported files, which live as long as this process."""
