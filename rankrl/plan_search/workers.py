"""Worker processes that score plans: on this machine, or on a Ray cluster.

A worker is sent one function that builds a scorer, builds it once, and then applies it to one task after the
other. Workers run torch on one thread each.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, Protocol, get_args

import torch

from rankrl.errors import ConfigError, RankrlError, did_you_mean

Cluster = Literal["local", "ray"]
Scorer = Callable[[Any], Any]
Builder = Callable[[], Scorer]

_GO_ON = "What was scored so far is saved; resume the run, with a smaller search.workers if memory ran out"


class WorkerError(RankrlError):
    """A worker process died or could not be reached."""


class WorkerPool(Protocol):
    """Processes that apply a scorer to tasks.

    Attributes:
        size: How many there are.
    """

    size: int

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the scorer's results, in the order of the tasks.

        Raises:
            WorkerError: A worker died.
            Exception: What the scorer, or building it, raised.
        """

    def close(self) -> None:
        """End the processes."""


class LocalWorkers:
    """Processes on this machine.

    They are started by the first tasks. They ignore Ctrl-C, which the main process handles, and end when the
    main process does, however it ends.

    Args:
        build: Makes the scorer; it is pickled, sent, and called in every process.
        size: How many processes.

    Raises:
        ConfigError: `build` cannot be pickled.
    """

    def __init__(self, build: Builder, size: int) -> None:
        self.size = size
        try:
            self._build = pickle.dumps(build)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"search.workers={size}: the network or its score cannot be sent to processes ({error}). "
                "Define both at the top level of a module that can be imported, or leave out the workers"
            ) from error
        self._executor: ProcessPoolExecutor | None = None

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the scorer's results, in the order of the tasks; see `WorkerPool`."""
        try:
            if self._executor is None:
                self._executor = self._start()
            futures: list[Future[Any]] = [self._executor.submit(_apply, task) for task in tasks]
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            self.close()
            raise WorkerError(f"one of {self.size} worker processes died. {_GO_ON}") from error

    def close(self) -> None:
        """End the processes; later tasks start new ones."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _start(self) -> ProcessPoolExecutor:
        executor = ProcessPoolExecutor(
            self.size,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(self._build,),
        )
        # A process inherits what its parent ignores, so that Ctrl-C spares it from its first moment on.
        main_thread = threading.current_thread() is threading.main_thread()
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN) if main_thread else None
        try:
            for _ in range(self.size):
                executor.submit(_ready)
        finally:
            if previous is not None:
                signal.signal(signal.SIGINT, previous)
        return executor


class RayWorkers:
    """Actors on a Ray cluster: the one that the environment variable RAY_ADDRESS names, else one made here.

    Args:
        build: Makes the scorer; it is serialised by Ray, sent, and called in every actor.
        size: How many actors, one processor core each.

    Raises:
        ConfigError: Ray is not installed.
        WorkerError: The cluster cannot be reached.
    """

    def __init__(self, build: Builder, size: int) -> None:
        self.size = size
        try:
            self._ray = importlib.import_module("ray")
        except ImportError as error:
            raise ConfigError(
                f"search.cluster=ray needs Ray, which cannot be imported ({error}); install the extra `ray`, "
                "or use search.cluster=local"
            ) from error
        if not self._ray.is_initialized():
            try:
                self._ray.init(log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise WorkerError(f"the Ray cluster cannot be reached: {error}") from error
        actor = self._ray.remote(num_cpus=1)(_RayWorker)
        held = self._ray.put(build)
        self._actors = [actor.remote(held) for _ in range(size)]

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the scorer's results, in the order of the tasks; see `WorkerPool`."""
        pool = importlib.import_module("ray.util").ActorPool(self._actors)
        try:
            return list(pool.map(lambda actor, task: actor.apply.remote(task), tasks))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            raise WorkerError(f"a worker of the Ray cluster failed: {reason} {_GO_ON}") from error

    def close(self) -> None:
        """End the actors; a cluster that was there before stays."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []


def create_pool(build: Builder, size: int, cluster: str = "local") -> WorkerPool:
    """Return a pool of workers.

    Args:
        build: Makes the scorer, in each worker.
        size: How many workers.
        cluster: `local` or `ray`.

    Raises:
        ConfigError: An argument is out of range, `build` cannot be sent, or Ray is not installed.
        WorkerError: The cluster cannot be reached.
    """
    check_workers(size, cluster)
    return RayWorkers(build, size) if cluster == "ray" else LocalWorkers(build, size)


def check_workers(size: int | None, cluster: str) -> None:
    """Refuse options of a pool that cannot be right.

    Raises:
        ConfigError: Naming the option.
    """
    if cluster not in get_args(Cluster):
        raise ConfigError(
            f"search.cluster must be one of {', '.join(get_args(Cluster))}, got {cluster!r}."
            f"{did_you_mean(cluster, get_args(Cluster))}"
        )
    if size is None and cluster != "local":
        raise ConfigError(f"search.cluster={cluster} needs search.workers=N, the number of workers")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigError(
            f"search.workers must be a whole number >= 1, or null to score in this process; got {size!r}"
        )


class _RayWorker:
    """What runs in a Ray actor."""

    def __init__(self, build: Builder) -> None:
        torch.set_num_threads(1)
        self._build = build
        self._scorer: Scorer | None = None

    def apply(self, task: Any) -> Any:
        if self._scorer is None:
            self._scorer = self._build()
        return self._scorer(task)


class _Process:
    """What a local worker process holds."""

    build: bytes = b""
    scorer: Scorer | None = None


def _begin(build: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Process.build = build


def _end_with_parent() -> None:
    """A killed main process cannot end its workers; they see for themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ready() -> None:
    """The first task of a process: it makes the executor start one."""


def _apply(task: Any) -> Any:
    # Built here rather than at the start of the process: what goes wrong then reaches the caller.
    if _Process.scorer is None:
        _Process.scorer = pickle.loads(_Process.build)()
    return _Process.scorer(task)
