"""Time groups of files on this machine."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankrl.kits.kit import FileGroup
from rankrl.onnx.protobuf import save_model
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, open_session
from rankrl.timing.latency import clock_for, timed_passes


@dataclass(frozen=True)
class LocalStopwatch:
    """Times files in a runtime here; a `Stopwatch`."""

    threads: int
    runtime: str = DEFAULT_RUNTIME

    def times(self, group: FileGroup) -> np.ndarray:
        """Return the median milliseconds of each file."""
        models, inputs = group.contents()
        sessions = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timed.onnx"
            for model in models:
                save_model(model, path)
                sessions.append(open_session(path, threads=self.threads, runtime=self.runtime))
        count, clock = len(sessions), clock_for(self.threads, self.runtime)
        times, _ = timed_passes(
            sessions,
            [inputs] * count,
            [clock] * count,
            runs=group.runs,
            warm_up=group.warm_up,
            settle=True,
        )
        medians: np.ndarray = np.median(times, axis=0)
        return medians
