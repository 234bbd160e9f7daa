"""Run the work of a search in worker processes, on this machine or on a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from decomposition.choose.processes import (
    MOST_DEATHS,
    Build,
    Lost,
    WorkerPool,
    local_pool,
    without_gradients,
)
from rankrl.device import reuse_memory
from rankrl.errors import ConfigError, RankrlError, counted
from rankrl.options.search import Cluster, check_workers

log = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds without a worker before the log says so


class WorkerError(RankrlError):
    """A worker process died or could not be reached."""


@dataclass(frozen=True)
class Workers:
    """The number of worker processes, where they run, and the resources of each."""

    size: int
    cluster: Cluster = "local"
    cpus: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_workers(self.size, self.cluster, self.cpus, self.gpus)


class WorkerCluster:
    """The workers of a search; processes are started for each work."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        if workers.cluster == "ray":
            _check_room(connected_ray("search.cluster=ray", "; or use search.cluster=local"), workers)

    def spread(self, function: Callable[[Any], Any], jobs: Iterable[Any], work: str) -> Iterator[Any]:
        """Yield the results of a function on jobs; see `in_processes`."""
        del work
        yield from self.pool(partial(without_gradients, function)).results(jobs)

    def pool(self, build: Build) -> WorkerPool:
        """Return workers that build a function once, and apply it to their jobs."""
        workers, build = self.workers, partial(_built, build)
        if workers.cluster == "ray":
            return ray_pool(build, workers.size, cpus=workers.cpus, gpus=workers.gpus, lost=_lost)
        try:
            return local_pool(build, workers.size, threads=workers.cpus, lost=_lost)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"search.workers={workers.size}: the network or its score cannot be sent to processes "
                f"({error}). Define both at the top level of a module that can be imported, or leave out the "
                "workers"
            ) from error


def _lost(reason: str) -> WorkerError:
    return WorkerError(
        f"a worker process died ({reason}). What was scored so far is saved; resume the run, with a smaller "
        "search.workers if memory ran out"
    )


def _built(build: Build) -> Callable[[Any], Any]:
    reuse_memory()
    return build()


def connected_ray(option: str, otherwise: str = "", **arguments: Any) -> Any:
    """Return the module `ray`, connected to the cluster of RAY_ADDRESS or to one made here."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{option} needs Ray, which cannot be imported ({error}); install the extra `ray`{otherwise}"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(**{"log_to_driver": False, "logging_level": "error", **arguments})
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"the Ray cluster cannot be reached: {error}") from error
    return ray


def _check_room(ray: Any, workers: Workers) -> None:
    needed = {"CPU": float(workers.cpus), "GPU": float(workers.gpus)}
    nodes: list[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0.0) >= amount for name, amount in needed.items()) for node in nodes):
        return
    has = "; ".join(", ".join(f"{node.get(name, 0.0):g} {name}" for name in needed) for node in nodes)
    message = (
        f"no node of the Ray cluster has the {workers.cpus} CPU and {workers.gpus:g} GPU of "
        f"search.worker_cpus and search.worker_gpus; its nodes have {has or 'nothing'}"
    )
    if "RAY_ADDRESS" not in os.environ:
        raise ConfigError(f"{message}. Ask for less, or name a cluster with RAY_ADDRESS")
    log.warning("%s. Waiting for a node that has", message)  # autoscalers add nodes when asked


def ray_pool(
    build: Build, size: int, *, cpus: int, gpus: float, deaths: int = MOST_DEATHS, lost: Lost
) -> WorkerPool:
    """Return actors of the connected Ray cluster that build a function once, and apply it to their jobs."""
    ray = importlib.import_module("ray")
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": deaths}
    actor, shared = ray.remote(**options)(_Actor), ray.put(build)
    return WorkerPool([_RayWorker(ray, actor.remote(shared, cpus), gpus > 0, lost) for _ in range(size)])


class _RayWorker:
    """An actor, which Ray starts again if it dies."""

    def __init__(self, ray: Any, actor: Any, has_gpu: bool, lost: Lost) -> None:
        self._ray, self._actor, self._has_gpu, self._lost = ray, actor, has_gpu, lost

    def start(self) -> None:
        """Wait for the actor, as long as its cluster has no room for it."""
        place = self._actor.place.remote()
        if not self._ray.wait([place], timeout=_PATIENCE)[0]:
            log.warning("a worker waits for room; the cluster has %s", self._ray.available_resources())
        try:
            host, device, on_gpu = self._ray.get(place)
        except self._ray.exceptions.RayError as error:
            raise WorkerError(
                f"workers of the Ray cluster do not start: {_first_line(error)} Every node needs rankrl and "
                "its requirements"
            ) from error
        if self._has_gpu and not on_gpu:
            log.warning("the worker on %s computes on the CPU: torch sees no GPU there", host)
        else:
            log.info("worker on %s: %s", host, device)

    def apply(self, job: Any) -> Any:
        """Do a job; Ray does it again if the actor dies."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(self._actor.apply.remote(job))
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except errors.RayError as error:
            raise self._lost(_first_line(error)) from error

    def end(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)


class _Actor:
    """The process of a Ray worker."""

    def __init__(self, build: Build, threads: int) -> None:
        torch.set_num_threads(threads)
        self._build = build
        self._function: Callable[[Any], Any] | None = None

    def place(self) -> tuple[str, str, bool]:
        """Return the host, the device, and whether that is a GPU."""
        if torch.cuda.is_available():
            return socket.gethostname(), torch.cuda.get_device_name(), True
        return socket.gethostname(), counted(torch.get_num_threads(), "processor core"), False

    def apply(self, job: Any) -> Any:
        if self._function is None:
            self._function = self._build()
        return self._function(job)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
