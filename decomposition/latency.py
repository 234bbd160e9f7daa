"""A table of measured layer latencies, for budgets in time.

How a latency is measured (which runtime, batch size, number of threads) is the caller's; this is the noun
that carries the numbers to the allocation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from decomposition.curves import RankCurve
from decomposition.errors import DecompositionError
from decomposition.files import replacing
from decomposition.formats import Ranks

_VERSION = 1


@dataclass(frozen=True)
class LatencyTable:
    """Measured time of layers at ranks, all in the same unit and under the same conditions.

    Attributes:
        layers: For each layer name the time at each ranks tuple; `()` is the dense layer.
        rest: Time of everything that no layer of the table covers.
        conditions: How it was measured (runtime, batch, threads, machine), for the reader.
    """

    layers: Mapping[str, Mapping[Ranks, float]]
    rest: float = 0.0
    conditions: str = ""

    def __post_init__(self) -> None:
        for name, times in self.layers.items():
            if () not in times:
                raise DecompositionError(f"layer {name!r}: the latency table lacks the dense layer, ranks ()")
            for ranks, time in times.items():
                if not (np.isfinite(time) and time > 0):
                    raise DecompositionError(
                        f"layer {name!r}: the latency at ranks {ranks} is {time}; it must be positive"
                    )
        if not (np.isfinite(self.rest) and self.rest >= 0):
            raise DecompositionError(f"the latency of the rest is {self.rest}; it must be 0 or more")

    @property
    def total(self) -> float:
        """Time of the dense network."""
        return self.rest + sum(times[()] for times in self.layers.values())

    def attach(self, curves: Sequence[RankCurve]) -> list[RankCurve]:
        """Return the curves with measured latencies.

        Candidates that are slower than the dense layer are left out: within a budget in time nothing is
        gained by them.

        Raises:
            DecompositionError: If a layer or one of its candidates was not measured.
        """
        attached = []
        for curve in curves:
            times = self.layers.get(curve.spec.name, {})
            missing = [entry.ranks for entry in curve.entries if entry.ranks not in times]
            if missing:
                raise DecompositionError(
                    f"layer {curve.spec.name!r}: the latency table lacks ranks {missing[0]}; measure all "
                    f"candidates ({len(missing)} of {len(curve)} are missing)"
                )
            latency = np.array([times[entry.ranks] for entry in curve.entries])
            faster = [j for j in range(len(curve)) if j == len(curve) - 1 or latency[j] < latency[-1]]
            entries = tuple(curve.entries[j] for j in faster)
            if len(faster) < len(curve) and len(faster) == 1:
                entries = (replace(entries[-1], reason="no candidate is faster than the dense layer"),)
            attached.append(
                replace(
                    curve,
                    entries=entries,
                    params=curve.params[faster],
                    macs=curve.macs[faster],
                    errors=curve.errors[faster],
                    latency=latency[faster],
                )
            )
        return attached

    def save(self, path: Path) -> None:
        """Write the table as JSON; the file is replaced atomically."""
        content = {
            "version": _VERSION,
            "conditions": self.conditions,
            "rest": self.rest,
            "layers": {
                name: [[list(ranks), time] for ranks, time in times.items()]
                for name, times in self.layers.items()
            },
        }
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LatencyTable:
        """Read a table.

        Raises:
            DecompositionError: If the file is no latency table of this version.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != _VERSION:
                raise DecompositionError(
                    f"{path} has version {content['version']!r}, this release reads {_VERSION}; measure anew"
                )
            layers = {
                name: {tuple(map(int, ranks)): float(time) for ranks, time in times}
                for name, times in content["layers"].items()
            }
            return cls(layers, float(content["rest"]), str(content["conditions"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DecompositionError(f"{path} is no latency table ({error}); measure anew") from error
