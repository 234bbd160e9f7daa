"""Run workers as actors on a Ray cluster."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from decomposition.choose.processes import MOST_DEATHS
from rankrl.device import reuse_memory
from rankrl.errors import ConfigError, counted
from rankrl.workers.processes import (
    GO_ON,
    Builder,
    LocalCluster,
    Scorer,
    WorkerCluster,
    WorkerError,
    WorkerPool,
    Workers,
)

log = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds without any worker before the log says so
_Work = tuple[int, Any]  # a key, and a builder in Ray's store


class RayCluster:
    """Actors on the cluster that the environment variable RAY_ADDRESS names, else on one made here.

    Actors get work as soon as they are up, so that a cluster with room for only some works with those. Ray
    starts an actor that died (a killed process, a lost node) again, which then repeats its task.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._ray = connected_ray("search.cluster=ray")
        self._check_room()
        restarted = {"max_restarts": -1, "max_task_retries": MOST_DEATHS}
        kind = self._ray.remote(num_cpus=workers.cpus, num_gpus=workers.gpus, **restarted)(_Actor)
        self._actors = [kind.remote(workers.cpus) for _ in range(workers.size)]
        self._starting = {actor.place.remote(): actor for actor in self._actors}
        self._idle: list[Any] = []
        self._keys = itertools.count()

    def spread(self, function: Callable[[Any], Any], jobs: Iterable[Any], work: str) -> Iterator[Any]:
        del work
        for _, result in self._results(self._built(lambda: torch.no_grad()(function)), jobs):
            yield result

    def pool(self, build: Builder) -> WorkerPool:
        return _Pool(self, self._built(build), self.workers.size)

    def close(self) -> None:
        """End the actors; a cluster that was there before stays."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._idle, self._starting = [], [], {}

    def _check_room(self) -> None:
        needed = {"CPU": float(self.workers.cpus), "GPU": float(self.workers.gpus)}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0.0) >= amount for name, amount in needed.items()) for node in nodes):
            return
        has = "; ".join(", ".join(f"{node.get(name, 0.0):g} {name}" for name in needed) for node in nodes)
        message = (
            f"no node of the Ray cluster has the {self.workers.cpus} CPU and {self.workers.gpus:g} GPU of "
            f"search.worker_cpus and search.worker_gpus; its nodes have {has or 'nothing'}"
        )
        if "RAY_ADDRESS" not in os.environ:
            raise ConfigError(f"{message}. Ask for less, or name a cluster with RAY_ADDRESS")
        log.warning("%s. Waiting for a node that has", message)  # autoscalers add nodes when asked

    def _built(self, build: Builder) -> _Work:
        return next(self._keys), self._ray.put(build)

    def _results(self, work: _Work, tasks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        fresh = enumerate(tasks)
        running: dict[Any, tuple[Any, int]] = {}
        try:
            while True:
                while self._idle and (job := next(fresh, None)) is not None:
                    (index, task), actor = job, self._idle.pop()
                    running[actor.apply.remote(*work, task)] = actor, index
                if not running and self._idle:
                    return
                yield from self._finished(running)
        finally:
            # An actor works through its queue, so that an abandoned task only delays its next one.
            self._idle += [actor for actor, _ in running.values()]

    def _finished(self, running: dict[Any, tuple[Any, int]]) -> Iterator[tuple[int, Any]]:
        """Wait for a started actor or for a result, and yield a result."""
        errors = self._ray.exceptions
        done, _ = self._ray.wait([*running, *self._starting], num_returns=1, timeout=_PATIENCE)
        if not done and not running:
            log.warning("no worker has started yet; the cluster has %s", self._ray.available_resources())
        for reference in done:
            if reference in self._starting:
                self._take_in(reference)
                continue
            actor, index = running.pop(reference)
            self._idle.append(actor)
            try:
                yield index, self._ray.get(reference)
            except errors.RayTaskError as error:
                raise error.cause if isinstance(error.cause, Exception) else error from error
            except errors.RayError as error:
                raise WorkerError(
                    f"a worker of the Ray cluster died: {_first_line(error)} {GO_ON}"
                ) from error

    def _take_in(self, reference: Any) -> None:
        """Add an actor that is up to the idle ones."""
        actor = self._starting.pop(reference)
        try:
            host, device, on_gpu = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise WorkerError(
                f"workers of the Ray cluster do not start: {_first_line(error)} Every node needs rankrl and "
                "its requirements"
            ) from error
        self._idle.append(actor)
        if self.workers.gpus > 0 and not on_gpu:
            log.warning("the worker on %s computes on the CPU: torch sees no GPU there", host)
        else:
            log.info("worker on %s: %s", host, device)


class _Pool:
    def __init__(self, cluster: RayCluster, work: _Work, size: int) -> None:
        self.size = size
        self._cluster, self._work = cluster, work

    def map(self, tasks: Sequence[Any]) -> list[Any]:
        results = dict(self._cluster._results(self._work, tasks))
        return [results[index] for index in range(len(tasks))]

    def close(self) -> None:
        """Do nothing: workers end with their cluster."""


class _Actor:
    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        reuse_memory()
        self._scorers: dict[int, Scorer] = {}

    def place(self) -> tuple[str, str, bool]:
        """Return the host, the name of the device, and whether that is a GPU."""
        if torch.cuda.is_available():
            return socket.gethostname(), torch.cuda.get_device_name(), True
        return socket.gethostname(), counted(torch.get_num_threads(), "processor core"), False

    def apply(self, key: int, build: Builder, task: Any) -> Any:
        if key not in self._scorers:
            self._scorers[key] = build()
        return self._scorers[key](task)


def connected_ray(option: str, **arguments: Any) -> Any:
    """Import Ray for an option, and connect it to the cluster of RAY_ADDRESS or to one made here."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{option} needs Ray, which cannot be imported ({error}); install the extra `ray`"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(**{"log_to_driver": False, "logging_level": "error", **arguments})
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"the Ray cluster cannot be reached: {error}") from error
    return ray


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def open_cluster(workers: Workers) -> WorkerCluster:
    if workers.cluster == "local":
        return LocalCluster(workers)
    return RayCluster(workers)
