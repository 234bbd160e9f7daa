"""The cluster of workers: this machine, or a Ray cluster."""

from __future__ import annotations

from rankrl.workers.base import LocalCluster, WorkerCluster, Workers


def open_cluster(workers: Workers) -> WorkerCluster:
    """Return the cluster that the workers are on."""
    if workers.cluster == "local":
        return LocalCluster(workers)
    from rankrl.workers.ray_cluster import RayCluster

    return RayCluster(workers)
