"""Measure what keeping freed memory for the next batch brings: evaluation and training of whole networks.

    OMP_NUM_THREADS=1 python scripts/bench_memory.py --output scripts/results/bench_memory.csv

With `--stages` it measures the most memory that each stage of a compression holds of networks with a very
wide layer, or large maps, as a module and as a file, each stage in a process of its own:

    OMP_NUM_THREADS=1 python scripts/bench_memory.py --stages all --output scripts/results/memory_stages.csv

Every measurement is a process of its own, with `rankrl.reuse_memory` and without it in turns, on random
images in the precision that suits the processor; medians of the turns. Page faults are those of the kernel's
count while the images are evaluated.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from bench_frame import command_line, markdown, publish, say
from torch import nn

import decomposition
import rankrl
from decomposition import FitOptions
from decomposition.plan.plan import fingerprint
from rankrl import LatencyOptions, reuse_memory
from rankrl.data import Images
from rankrl.device import inference_precision
from rankrl.models import create_model
from rankrl.networks.graph import fit_library, measured_sensitivities
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.export import export_onnx
from rankrl.onnx.graph import PreparedFile
from rankrl.onnx.graph.capture import collect_moments
from rankrl.onnx.graph.refit import refitted_graph
from rankrl.training.accuracy import predict_logits

_CLASSES = 10
_WARM_UP = 3
_LONGEST = 720
"""Seconds of processor time that a stage may take."""
_QUICK = {"candidates": 3, "iterations": 8, "final_iterations": 8}


@dataclass(frozen=True)
class Measured:
    """Hold what one process measured: images a second, page faults an image, and its peak memory in MB."""

    reused: bool
    evaluated: float
    trained: float
    faults: float
    memory: float


def measure(name: str, size: int, images: int, batch: int, steps: int, *, reuse: bool) -> Measured:
    """Evaluate and train a network on random images in this process."""
    reused = reuse and reuse_memory()
    shape = (3, size, size)
    model, _, inner = name.partition("/")
    network = create_model(
        model, input_shape=shape, num_classes=_CLASSES, **({"name": inner} if inner else {})
    )
    evaluated, faults = _evaluation(network, shape, images)
    trained = batch / statistics.median(_seconds(_step(network, shape, batch), steps))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return Measured(reused, evaluated, trained, faults, memory)


def _evaluation(network: nn.Module, shape: tuple[int, ...], count: int) -> tuple[float, float]:
    images = Images(torch.randint(256, (count, *shape), dtype=torch.uint8), torch.randint(_CLASSES, (count,)))

    def evaluate() -> None:
        predict_logits(network, images, mean=(0.5,) * 3, std=(0.25,) * 3)

    evaluate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = _seconds(evaluate, 3)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return count / statistics.median(seconds), faults / (count * (len(seconds) + _WARM_UP))


def _step(network: nn.Module, shape: tuple[int, ...], batch: int) -> Callable[[], None]:
    network = network.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    x = torch.randn(batch, *shape).to(memory_format=torch.channels_last)
    y = torch.randint(_CLASSES, (batch,))
    precision = inference_precision()

    def step() -> None:
        with precision.autocast():
            loss = F.cross_entropy(network(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _seconds(work: Callable[[], None], times: int) -> list[float]:
    seconds = []
    for number in range(_WARM_UP + times):
        start = time.perf_counter()
        work()
        if number >= _WARM_UP:
            seconds.append(time.perf_counter() - start)
    return seconds


def in_a_process(arguments: Sequence[str], *, reuse: bool) -> Measured:
    """Measure in another process."""
    command = [sys.executable, __file__, *arguments, "--here", "reuse" if reuse else "return"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(answer.stdout))


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
    """List the names of a file's inputs."""
    return [each.name for each in onnx.load(path, load_external_data=False).graph.input]


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (_LONGEST, _LONGEST))


def stages(options: argparse.Namespace) -> str:
    """Measure stages and return the table as Markdown."""
    rows = []
    names = list(WIDE) if options.stages == ["all"] else options.stages
    for name, kind, stage in product(names, options.kinds, options.of or STAGES):
        command = [sys.executable, __file__, "--here", "reuse", "--stages", name, "--of", kind, stage]
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


def report(options: argparse.Namespace) -> str:
    """Measure every network in turns and return the table as Markdown."""
    rows = []
    for asked in options.networks:
        name, size, *_ = asked.split(":")
        words = ["--networks", asked, "--steps", str(options.steps)]
        sides: dict[bool, list[Measured]] = {False: [], True: []}
        for turn, (reuse, results) in product(range(options.turns), sides.items()):
            say(f"{asked}, turn {turn + 1}, {'with' if reuse else 'without'}")
            results.append(in_a_process(words, reuse=reuse))
        if not all(each.reused for each in sides[True]):
            sys.exit("bench_memory.py: memory cannot be reused here; see rankrl.reuse_memory")
        medians = {
            value: [statistics.median(getattr(each, value) for each in side) for side in sides.values()]
            for value in ("evaluated", "trained", "faults", "memory")
        }
        row = [name, f"{size} x {size}"]
        for value, (without, reused) in medians.items():
            row += [f"{without:.0f}", f"{reused:.0f}"]
            row += [f"{reused / without:.2f}"] if value in ("evaluated", "trained") else []
        rows.append(row)
    speeds = [f"{kind}, images/s" for kind in ("evaluated", "trained")]
    head = ["network", "input"]
    for speed in speeds:
        head += [speed, "with memory reused", "ratio"]
    return markdown([*head, "faults an image", "then", "memory, MB", "then"], rows)


def main() -> None:
    """Read the command line, run, print and perhaps save the table."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--networks",
        nargs="+",
        default=["resnet20:32:4000:128", "resnet56:32:2000:128", "resnet9:32:2000:128"],
        help="NAME:SIZE:IMAGES:BATCH, how many are evaluated and how many a batch of training has; "
        "NAME may be torchvision/resnet50, for example",
    )
    parser.add_argument("--steps", type=int, default=9, help="of training (default 9)")
    parser.add_argument("--turns", type=int, default=3, help="(default 3)")
    parser.add_argument("--here", choices=["reuse", "return"], help=argparse.SUPPRESS)
    parser.add_argument("--stages", nargs="+", metavar="NETWORK", help=f"all, or some of {list(WIDE)}")
    parser.add_argument("--of", nargs="+", metavar="STAGE", help=f"some of {STAGES} (default all)")
    parser.add_argument("--kinds", nargs="+", default=["module", "file"], help="(default module file)")
    parser.add_argument("--gigabytes", type=float, default=14.0, help="of addresses a stage (default 14)")
    options = parser.parse_args()
    if options.here and options.stages:
        run_stage(options.stages[0], *options.of)
        return
    if options.here:
        (asked,) = options.networks
        name, *sizes = asked.split(":")
        measured = measure(name, *map(int, sizes), options.steps, reuse=options.here == "reuse")
        print(json.dumps(asdict(measured)))
        return
    table = stages(options) if options.stages else report(options)
    publish(table, options.output, section="bench_memory", title="Memory that is used again")


if __name__ == "__main__":
    main()
