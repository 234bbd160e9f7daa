"""What it brings to keep freed memory for the next batch: evaluation and training of whole networks.

    OMP_NUM_THREADS=1 python scripts/bench_memory.py --output scripts/results/bench_memory.csv

Every measurement is a process of its own, with `rankrl.reuse_memory` and without it in turns, on random
images in the precision that suits the processor; medians of the turns. Page faults are those of the kernel's
count while the images are evaluated.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from rankrl import reuse_memory
from rankrl.data import Images
from rankrl.device import inference_precision
from rankrl.models import create_model
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line
from rankrl.training.accuracy import predict_logits

_CLASSES = 10
_WARM_UP = 3


@dataclass(frozen=True)
class Measured:
    """What one process measured.

    Attributes:
        reused: Whether freed memory was kept.
        evaluated: Images a second.
        trained: Images a second.
        faults: Page faults for each image that was evaluated.
        memory: The most memory of the process, in MB.
    """

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
    """Return what another process measures."""
    command = [sys.executable, __file__, *arguments, "--here", "reuse" if reuse else "return"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(answer.stdout))


def report(options: argparse.Namespace) -> str:
    """Measure every network in turns and return the table as Markdown."""
    lines = [
        "| network | input | evaluated, images/s | with memory reused | ratio | trained, images/s "
        "| with memory reused | ratio | faults an image | then | memory, MB | then |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for asked in options.networks:
        name, size, *_ = asked.split(":")
        sides: dict[bool, list[Measured]] = {False: [], True: []}
        for turn in range(options.turns):
            for reuse, results in sides.items():
                print(
                    f"{asked}, turn {turn + 1}, {'with' if reuse else 'without'}", file=sys.stderr, flush=True
                )
                results.append(
                    in_a_process(["--networks", asked, "--steps", str(options.steps)], reuse=reuse)
                )
        if not all(each.reused for each in sides[True]):
            sys.exit("bench_memory.py: memory cannot be reused here; see rankrl.reuse_memory")

        def both(value: str, sides: dict[bool, list[Measured]] = sides) -> list[float]:
            return [statistics.median(getattr(each, value) for each in results) for results in sides.values()]

        cells = [name, f"{size} x {size}"]
        for value in ("evaluated", "trained"):
            without, reused = both(value)
            cells += [f"{without:.0f}", f"{reused:.0f}", f"{reused / without:.2f}"]
        cells += [f"{each:.0f}" for value in ("faults", "memory") for each in both(value)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run, print and perhaps save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    if options.here:
        (asked,) = options.networks
        name, *sizes = asked.split(":")
        measured = measure(name, *map(int, sizes), options.steps, reuse=options.here == "reuse")
        print(json.dumps(asdict(measured)))
        return
    text = f"`{shown_command(sys.argv)}`\n\n{hardware_line()}\n\n{report(options)}"
    print(text)
    if options.output:
        write_section(options.output, "bench_memory", "Memory that is used again", text)


if __name__ == "__main__":
    main()
