"""One GPU for each job, where a machine has several and jobs run in parallel."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import MutableMapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def runs_in_pool() -> bool:
    """Tell whether this process is one of a pool's workers."""
    return multiprocessing.current_process().name != "MainProcess"


def worker_number(job: int) -> int:
    """Return the number of this worker in its pool, from 0 on; the number of the job where there is none.

    A pool's worker keeps the first GPU that it has used, so GPUs are dealt to workers there.
    """
    number = re.search(r"-(\d+)$", multiprocessing.current_process().name)
    return job if number is None else int(number[1]) - 1


def take_one_gpu(job: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let this process see one GPU only, by the number of its worker or job.

    The choice of a cluster's scheduler (one device in CUDA_VISIBLE_DEVICES, or none) stays as it is. To be
    called before anything uses a GPU.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        import torch  # when a job begins; the command line looks at sweeps without it

        devices = [str(index) for index in range(torch.cuda.device_count())]
    else:
        devices = [name for name in visible.split(",") if name.strip()]
    if len(devices) > 1:
        environment[VISIBLE] = devices[worker_number(job) % len(devices)]
