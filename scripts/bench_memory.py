"""Measure the most memory that each stage of a compression holds, of a module and of a file.

    OMP_NUM_THREADS=1 python scripts/bench_memory.py --output scripts/results/memory_stages.csv

The networks have a very wide layer, or large maps; every stage is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from bench_frame import command_line, markdown, publish, say
from torch import nn

import decomposition
import rankrl
from decomposition import FitOptions
from decomposition.plan.plan import fingerprint
from rankrl import LatencyOptions
from rankrl.networks.graph import fit_library, measured_sensitivities
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.export import export_onnx
from rankrl.onnx.graph import PreparedFile
from rankrl.onnx.graph.calibration import collect_moments
from rankrl.onnx.graph.compressed import refitted_graph

_LONGEST = 720
"""Seconds of processor time that a stage may take."""
_QUICK = {"candidates": 3, "iterations": 8, "final_iterations": 8}


@dataclass(frozen=True)
class Wide:
    """A network with a very wide layer or large maps."""

    layers: Callable[[], list[nn.Module]]
    shape: tuple[int, ...]
    inputs: int


WIDE = {
    "conv1d 1024 x 1024 x 64": Wide(
        lambda: [
            *(nn.Conv1d(1, 1024, 8), nn.ReLU(), nn.Conv1d(1024, 1024, 64), nn.ReLU()),
            *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(1024, 16)),
        ],
        (1, 134),
        96,
    ),
    "linear 50000 to 1000": Wide(
        lambda: [nn.Linear(50_000, 1000), nn.ReLU(), nn.Linear(1000, 16)], (50_000,), 512
    ),
    "linear 768 to 50000": Wide(lambda: [nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 50_000)], (64,), 512),
    "maps 901 x 160 x 128": Wide(
        lambda: [
            *(nn.Conv2d(1, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU()),
            nn.Conv2d(128, 1, 1),
        ],
        (1, 901, 160),
        12,
    ),
}
STAGES = ("load", "moments", "sensitivities", "fits", "refit", "compress", "compress in time")
"""Each with what it needs of those before."""


def run_stage(name: str, kind: str, stage: str) -> None:
    """Run a stage of the compression of a wide network in this process."""
    wide, seed = WIDE[name], torch.manual_seed(0)
    model = nn.Sequential(*wide.layers()).eval()
    x = torch.randn(wide.inputs, *wide.shape, generator=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        if kind == "file":
            export_onnx(model, path, wide.shape)
            del model
        if stage.startswith("compress"):
            timing = LatencyOptions(batch=2, runs=2, int8=False)
            budget = {"latency": 0.7} if stage.endswith("time") else {"params": 0.6}
            given: Any = {onnx_inputs(path)[0]: x.numpy()} if kind == "file" else x
            rankrl.compress(
                path if kind == "file" else model,
                given,
                Path(folder) / ("small.onnx" if kind == "file" else "small"),
                decomposition=rankrl.DecompositionOptions(format="tucker", **_QUICK),
                timing=timing,
                progress=False,
                **budget,
            )
        elif kind == "file":
            _stage_of_file(path, x.numpy(), stage)
        else:
            _stage_of_module(model, x, wide.shape, stage)


def _stage_of_module(model: nn.Module, x: torch.Tensor, shape: tuple[int, ...], stage: str) -> None:
    specs = decomposition.compressible_layers(model, shape)
    options = FitOptions(iterations=_QUICK["iterations"])
    if stage == "moments":
        decomposition.collect_moments(model, specs, x.split(16))
    elif stage == "sensitivities":
        decomposition.collect_sensitivities(model, specs, x.split(16))
    elif stage == "fits":
        library = decomposition.FitLibrary.calibrated(model, shape, "tucker", x.split(16), options=options)
        library.all_candidates(limit=_QUICK["candidates"])
    elif stage == "refit":
        plan = decomposition.make_plan(model, shape, "tucker", 16)
        decomposition.apply_plan(model, plan, x, options=options)


def _stage_of_file(path: Path, x: np.ndarray, stage: str) -> None:
    file = PreparedFile.read(path, {onnx_inputs(path)[0]: x})
    candidates = CandidateOptions(("tucker",), iterations=_QUICK["iterations"])
    if stage == "moments":
        collect_moments(file.network, file.usable, file.split.calibration)
    elif stage == "sensitivities":
        measured_sensitivities(file)
    elif stage == "fits":
        fit_library(file, candidates).all_candidates(limit=_QUICK["candidates"])
    elif stage == "refit":
        layers = [
            decomposition.LayerPlan(
                site.name,
                ()
                if site.spec.refusal is not None
                else (decomposition.Factorise("tucker", (16,) * (1 + (site.spec.kernel_elements > 1))),),
            )
            for site in file.sites
        ]
        plan = decomposition.CompressionPlan(
            tuple(layers), fingerprint([site.spec for site in file.sites]), x.shape[1:]
        )
        options = FitOptions(iterations=_QUICK["final_iterations"])
        refitted_graph(
            file.network, file.sites, plan, file.split.calibration, sensitivities={}, options=options
        )


def onnx_inputs(path: Path) -> list[str]:
    return [each.name for each in onnx.load(path, load_external_data=False).graph.input]


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (_LONGEST, _LONGEST))


def stages(options: argparse.Namespace) -> str:
    rows = []
    for name, kind, stage in product(options.networks, options.kinds, options.stages):
        command = [sys.executable, __file__, "--here", name, kind, stage]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(_limit, int(options.gigabytes * 1e9)),
        )
        errors = process.stderr.read() if process.stderr is not None else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        memory = f"{usage.ru_maxrss / 1e6:.2f}"
        if status:
            lines_of_it = [line for line in errors.splitlines() if "Error" in line or "error" in line]
            reason = (
                lines_of_it[-1][:90] if process.returncode > 0 else signal.Signals(-process.returncode).name
            )
            memory = f"ended at {memory}: {reason}"
        rows.append((name, kind, stage, memory, f"{usage.ru_utime + usage.ru_stime:.0f}"))
        say(", ".join(rows[-1]))
    return markdown(("network", "as", "stage", "memory, GB", "processor time, s"), rows, left=range(3))


def main() -> None:
    """Read the command line, run, print and perhaps save the table."""
    parser = command_line(__doc__)
    parser.add_argument("--networks", nargs="+", choices=WIDE, default=list(WIDE), help="(default all)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="(default all)")
    parser.add_argument("--kinds", nargs="+", default=["module", "file"], help="(default module file)")
    parser.add_argument("--gigabytes", type=float, default=14.0, help="of addresses a stage (default 14)")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_stage(*options.here)
        return
    publish(stages(options), options.output, section="memory_stages", title="Memory of each stage")


if __name__ == "__main__":
    main()
