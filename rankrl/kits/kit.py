"""Write kits: folders of files, with programs that time and compare them on another device."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from decomposition import CompressionPlan
from decomposition.cache import digest
from rankrl.errors import ConfigError
from rankrl.files import write_atomically, write_json
from rankrl.onnx.protobuf import load_model, to_proto
from rankrl.onnx.runtimes import Batch
from rankrl.options.timing import LatencyOptions

Contents = tuple[Sequence[ir.Model], Batch]
"""The files of a group, and the inputs that all of them take."""


@dataclass(frozen=True)
class FileGroup:
    """Files that are timed in turns on the same inputs, an untimed pass of each before every timed one.

    The untimed pass brings a file's tensors back into the processor's cache, from which the other files have
    pushed them; those of a network that runs again and again stay there.
    """

    names: tuple[str, ...]
    contents: Callable[[], Contents]
    runs: int
    warm_up: int = 6


class Stopwatch(Protocol):
    """A source of the times of files."""

    def times(self, group: FileGroup) -> np.ndarray:
        """Return the milliseconds of each file, infinity for one that does not run."""


VERSION = 2
"""Version of kits and of the tables that they measure."""
KIT_FILE, TIMES_FILE = "kit.json", "times.json"
_PROGRAMS = ("measure.py", "measure.mjs", "kit.mjs", "index.html", "kit.css")
_PERIOD = 1021  # a prime, so that the rows of a weight differ


@dataclass(frozen=True)
class NamedFile:
    """The file of a whole network in a kit."""

    file: str
    title: str
    score: float | None = None
    plan: str | None = None


@dataclass(frozen=True)
class WrittenKit:
    folder: Path
    files: int
    bytes: int


class KitWriter:
    """Writes groups of files into a folder, each file once; a `Stopwatch` without times.

    Large weights are replaced by their first numbers, repeated: files then compress to a small fraction, and
    hold no usable network.
    """

    def __init__(self, folder: Path, about: Mapping[str, str], *, threads: int, whole: bool = False) -> None:
        self.folder, self.threads, self.about, self.whole = folder, threads, dict(about), whole
        self._names: set[str] = set()
        self._groups: list[dict[str, Any]] = []

    def times(self, group: FileGroup) -> np.ndarray:
        """Write the files that are new; return ones."""
        if not self._names.issuperset(group.names):
            models, inputs = group.contents()
            contents = dict(zip(group.names, models, strict=True))
            new = {name: model for name, model in contents.items() if name not in self._names}
            for name, model in new.items():
                write_atomically(self.folder / f"models/{name}.onnx.gz", packed(model, whole=self.whole))
            self._names |= new.keys()
            self._groups.append(
                {
                    "files": list(new),
                    "inputs": self._written(models[0], inputs),
                    "runs": group.runs,
                    "warm_up": group.warm_up,
                }
            )
        return np.ones(len(group.names))

    def finish(self, networks: Sequence[NamedFile]) -> WrittenKit:
        """Write the list of the files and the programs that time them."""
        content = {
            "version": VERSION,
            "about": self.about,
            "threads": self.threads,
            "compare": self.whole,
            "networks": [asdict(each) for each in networks],
            "groups": self._groups,
        }
        write_json(self.folder / KIT_FILE, {**content, "digest": digest(json.dumps(content))})
        programs = resources.files("rankrl.kits") / "assets"
        for name in _PROGRAMS:
            write_atomically(self.folder / name, (programs / name).read_bytes())
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return WrittenKit(self.folder, len(self._names), sum(path.stat().st_size for path in paths))

    def _written(self, model: ir.Model, inputs: Batch) -> list[dict[str, Any]]:
        if not isinstance(inputs, Mapping):
            inputs = {str(model.graph.inputs[0].name): inputs}
        return [self._written_array(name, np.asarray(array)) for name, array in inputs.items()]

    def _written_array(self, name: str, array: np.ndarray) -> dict[str, Any]:
        made_up = array.dtype.kind == "f" and not self.whole
        content = _repeated(array) if made_up else np.ascontiguousarray(array)
        path = f"inputs/{digest(content)}.bin.gz"
        if not (self.folder / path).exists():
            little = content.astype(content.dtype.newbyteorder("<"), copy=False)
            write_atomically(self.folder / path, gzip.compress(little.tobytes(), mtime=0))
        return {"name": name, "file": path, "dtype": str(array.dtype), "shape": list(array.shape)}


def packed(model: ir.Model, *, whole: bool = False) -> bytes:
    """Return a file without its large weights, or whole, compressed."""
    for value in () if whole else model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size > _PERIOD:
            value.const_value = ir.tensor(_repeated(tensor.numpy()), name=value.name, dtype=tensor.dtype)
    return gzip.compress(to_proto(model).SerializeToString(), mtime=0)


def _repeated(array: np.ndarray) -> np.ndarray:
    return np.resize(array.reshape(-1)[:_PERIOD], array.shape)


@dataclass(frozen=True)
class FinishedFile:
    title: str
    path: Path
    score: float | None = None
    plan: CompressionPlan | None = None


def write_verify_kit(
    files: Sequence[FinishedFile], inputs: Batch, folder: Path, timing: LatencyOptions
) -> WrittenKit:
    """Write finished networks into a folder, with programs that time them and compare their outputs."""
    named = [
        NamedFile(
            digest(each.path.read_bytes()),
            each.title,
            each.score,
            None if each.plan is None else each.plan.to_json(),
        )
        for each in files
    ]

    def contents() -> Contents:
        return [load_model(each.path) for each in files], inputs

    kit = KitWriter(folder, {"batch": str(timing.batch)}, threads=timing.threads, whole=True)
    names = tuple(each.file for each in named)
    kit.times(FileGroup(names, contents, 2 * timing.runs, warm_up=3))
    return kit.finish(named)


_WHAT = {
    "network": "of another network, or of another version of its weights",
    "candidates": "of other candidates (decomposition, candidates, calibration, seed)",
    "batch": "of another batch (export.batch)",
    "method": "of another version of rankrl",
}


@dataclass(frozen=True)
class TimedNetwork:
    """A whole network that runs on another device."""

    title: str
    score: float | None
    milliseconds: float
    share: float
    plan: CompressionPlan | None


@dataclass(frozen=True)
class TimesFile:
    """Times of a kit's files on another device; a `Stopwatch`."""

    path: Path
    about: Mapping[str, str]
    machine: Mapping[str, Any]
    known: Mapping[str, float]
    failed: Mapping[str, str]
    networks: Sequence[TimedNetwork] = ()

    @classmethod
    def load(cls, path: Path) -> TimesFile:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version, left = content["version"], content["left"]
            # Wall time includes other work of the device, so its minimum counts.
            wall = content["machine"]["clock"] == "wall"
            taken = "minimum_ms" if wall else "median_ms"
            times = {name: each[taken] for name, each in content["times"].items()}
            table = cls(path, content["about"], content["machine"], times, content["failed"])
            networks = content.get("networks", ())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"timing.table={path} is no table of a timing kit ({type(error).__name__}: {error}); give "
                "the times.json that measure.py wrote"
            ) from error
        if version != VERSION:
            raise ConfigError(
                f"timing.table={path} is of version {version}, this rankrl reads {VERSION}; write the kit "
                "with this version (task=timing_kit) and measure it anew"
            )
        for name, time in times.items():
            if not (isinstance(time, int | float) and math.isfinite(time) and time > 0):
                raise ConfigError(
                    f"timing.table={path}: the time of {name} is {time}; it must be a positive number of "
                    "milliseconds. Delete the entry and start measure.py in the kit again"
                )
        if left:
            raise ConfigError(
                f"timing.table={path} lacks {left} of the kit's files: the measurement was interrupted. "
                "Start measure.py in the kit again; it goes on where it stopped"
            )
        return replace(table, networks=table._timed(networks))

    def _timed(self, networks: Sequence[Mapping[str, Any]]) -> list[TimedNetwork]:
        """Return the kit's whole networks that run, if the first one does."""
        first = self.known.get(networks[0]["file"]) if networks else None
        return [
            TimedNetwork(each["title"], each["score"], time, time / first, self._plan(each["plan"]))
            for each in networks
            if first is not None and (time := self.known.get(each["file"])) is not None
        ]

    def _plan(self, text: str | None) -> CompressionPlan | None:
        return (
            None if text is None else CompressionPlan.from_json(text, f"a plan in timing.table={self.path}")
        )

    @property
    def conditions(self) -> str:
        machine = self.machine
        return (
            f"{machine['runtime']} {machine['version']}, batch {self.about['batch']}, "
            f"threads {machine['threads']}, {machine['processor']}, ms of {machine['clock']} time"
        )

    def check(self, about: Mapping[str, str], threads: int) -> None:
        """Refuse a table of another network, other candidates or options, or another number of threads."""
        for name, value in about.items():
            if self.about.get(name) != value:
                raise ConfigError(
                    f"timing.table={self.path} is {_WHAT[name]}: the kit has {self.about.get(name)}, this "
                    f"search {value}. Search with the options that the kit was written with, or write "
                    "and measure another kit (task=timing_kit)"
                )
        if self.machine["threads"] != threads:
            raise ConfigError(
                f"timing.table={self.path} was measured with threads={self.machine['threads']}, this search "
                f"has export.threads={threads}; set that to {self.machine['threads']}, or measure anew with "
                f"measure.py --threads {threads}"
            )

    def check_device(self, other: TimesFile) -> None:
        """Refuse a table of another processor, runtime, version, number of threads or batch size."""
        for name in ("processor", "runtime", "version", "threads"):
            if self.machine[name] != other.machine[name]:
                raise ConfigError(
                    f"timing.table={self.path} was measured with {name}={self.machine[name]}, "
                    f"timing.table={other.path} with {name}={other.machine[name]}; measure both kits on one "
                    "device in one runtime"
                )
        if self.about["batch"] != other.about["batch"]:
            raise ConfigError(
                f"timing.table={self.path} is {_WHAT['batch']}: {self.about['batch']} instead of "
                f"{other.about['batch']}; write the kit with that and measure it anew"
            )

    def times(self, group: FileGroup) -> np.ndarray:
        for name in group.names:
            if name not in self.known and name not in self.failed:
                raise ConfigError(
                    f"timing.table={self.path} lacks the file {name} of the kit; start measure.py in the kit "
                    "again, or write and measure another kit (task=timing_kit)"
                )
        return np.array([self.known.get(name, math.inf) for name in group.names])
