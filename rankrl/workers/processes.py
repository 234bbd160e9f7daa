"""Define pools of workers, and run them as processes on this machine.

A worker gets one function that builds a scorer, calls it once, and then applies the scorer to one task after
the other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from decomposition.choose.processes import LostWorkerError, Processes, in_processes
from rankrl.device import reuse_memory
from rankrl.errors import ConfigError, RankrlError
from rankrl.options.search import Cluster, check_workers

Scorer = Callable[[Any], Any]
Builder = Callable[[], Scorer]

GO_ON = "What was scored so far is saved; resume the run, with a smaller search.workers if memory ran out"


class WorkerError(RankrlError):
    """A worker process died or could not be reached."""


class WorkerPool(Protocol):
    """Processes that apply a scorer to tasks."""

    size: int

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the scorer's results, in the order of the tasks."""

    def close(self) -> None:
        """End the processes."""


class LocalWorkers:
    """Processes on this machine that build a scorer and apply it to tasks; see `Processes`."""

    def __init__(self, build: Builder, size: int, *, threads: int = 1) -> None:
        self.size = size
        try:
            built = pickle.dumps(build)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"search.workers={size}: the network or its score cannot be sent to processes ({error}). "
                "Define both at the top level of a module that can be imported, or leave out the workers"
            ) from error
        self._processes: Processes[Any, Any] = Processes(_Scoring(built), size, "scores", threads=threads)

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        try:
            results = dict(self._processes.results(tasks))
        except LostWorkerError as error:
            raise WorkerError(f"one of {self.size} worker processes died. {GO_ON}") from error
        return [results[index] for index in range(len(tasks))]

    def close(self) -> None:
        """End the processes; later tasks start new ones."""
        self._processes.close()


class _Scoring:
    """Builds the scorer with the first task, so that exceptions reach the caller."""

    def __init__(self, build: bytes) -> None:
        self._build = build
        self._scorer: Scorer | None = None

    def __call__(self, task: Any) -> Any:
        if self._scorer is None:
            reuse_memory()
            self._scorer = pickle.loads(self._build)()
        return self._scorer(task)


@dataclass(frozen=True)
class Workers:
    """The number of worker processes, where they run, and the resources of each."""

    size: int
    cluster: Cluster = "local"
    cpus: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_workers(self.size, self.cluster, self.cpus, self.gpus)


class WorkerCluster(Protocol):
    """A place where workers run, one pool at a time."""

    workers: Workers

    def spread(self, function: Callable[[Any], Any], jobs: Iterable[Any], work: str) -> Iterator[Any]:
        """Yield the results of a function on jobs, in the order in which they are finished."""

    def pool(self, build: Builder) -> WorkerPool:
        """Return workers that apply the scorer of `build`; see `LocalWorkers` for its errors."""

    def close(self) -> None:
        """End the workers."""


class LocalCluster:
    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def spread(self, function: Callable[[Any], Any], jobs: Iterable[Any], work: str) -> Iterator[Any]:
        return in_processes(function, jobs, self.workers.size, work, threads=self.workers.cpus)

    def pool(self, build: Builder) -> WorkerPool:
        return LocalWorkers(build, self.workers.size, threads=self.workers.cpus)

    def close(self) -> None:
        """Do nothing: processes end with their work."""
