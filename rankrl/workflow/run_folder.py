"""The files of one run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rankrl.errors import StorageError


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its results; `metrics.json` is written last, so a folder with it is complete.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def plan(self) -> Path:
        """The chosen plan."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """The numbers; their presence marks the run as finished."""
        return self.path / "metrics.json"

    @property
    def model(self) -> Path:
        """The compressed network with its plan."""
        return self.path / "model.safetensors"

    @property
    def onnx(self) -> Path:
        """The compressed network as ONNX."""
        return self.path / "model.onnx"

    @property
    def dense(self) -> Path:
        """The dense network that the run trained itself."""
        return self.path / "dense.safetensors"

    @property
    def state(self) -> Path:
        """Everything that resuming needs."""
        return self.path / "state"

    def prepare(self) -> None:
        """Create the folder and make sure that it can be written.

        Raises:
            StorageError: If it cannot be.
        """
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            probe = self.state / f".probe-{os.getpid()}"
            probe.write_bytes(b"writable")
            probe.unlink()
        except OSError as error:
            raise StorageError(
                f"the run folder {self.path} cannot be written ({error.strerror}); "
                "choose another one with hydra.run.dir=FOLDER"
            ) from error


def cache_folder() -> Path:
    """Return the folder for fits that later runs reuse: RANKRL_CACHE, or `rankrl` in the user's cache.

    Raises:
        StorageError: If it cannot be created.
    """
    chosen = os.environ.get("RANKRL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(chosen) if chosen else Path(base) / "rankrl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the cache folder {folder} cannot be created ({error.strerror}); "
            "set the environment variable RANKRL_CACHE to a writable folder"
        ) from error
    return folder
