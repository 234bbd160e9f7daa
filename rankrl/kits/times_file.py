"""Read and check the table of times that a kit measured on another device."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from decomposition import CompressionPlan
from rankrl.errors import ConfigError
from rankrl.kits.kit_writer import VERSION, FileGroup

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
        """Read a table."""
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
        """Conditions of the measurement, for readers."""
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
        """Return the milliseconds of each file, infinity for one that does not run there."""
        for name in group.names:
            if name not in self.known and name not in self.failed:
                raise ConfigError(
                    f"timing.table={self.path} lacks the file {name} of the kit; start measure.py in the kit "
                    "again, or write and measure another kit (task=timing_kit)"
                )
        return np.array([self.known.get(name, math.inf) for name in group.names])
