"""Step time and memory of OnnxAdam and OnnxAdagrad against torch's own, as ratios from one run.

    OMP_NUM_THREADS=1 python scripts/bench_optim.py --output scripts/results/bench_optim.csv

All contestants step in turn, round after round, so that a disturbance of the machine meets all of them; each
time is the median over the rounds. Temporary memory is the peak of what one step allocates and frees again.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_frame import command_line, in_turns, markdown, publish, say, seconds_of
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.models import resnet50

from optim import OnnxAdagrad, OnnxAdam

SAMPLE_SECONDS = 0.02

Shapes = list[tuple[int, ...]]

CONTESTANTS: dict[str, dict[str, Callable[[list[nn.Parameter]], Optimizer]]] = {
    "Adam": {
        "OnnxAdam": lambda params: OnnxAdam(params),
        "torch foreach": lambda params: torch.optim.Adam(params, foreach=True),
        "torch for-loop": lambda params: torch.optim.Adam(params, foreach=False),
        "torch fused": lambda params: torch.optim.Adam(params, fused=True),
    },
    "Adagrad": {
        "OnnxAdagrad": lambda params: OnnxAdagrad(params),
        "torch foreach": lambda params: torch.optim.Adagrad(params, foreach=True),
        "torch for-loop": lambda params: torch.optim.Adagrad(params, foreach=False),
        "torch fused": lambda params: torch.optim.Adagrad(params, fused=True),
    },
}


def cifar_resnet_shapes(depth: int) -> Shapes:
    """List the parameter shapes of the CIFAR ResNet of a depth 6n + 2 (He et al. 2016, section 4.2)."""
    shapes: Shapes = [(16, 3, 3, 3), (16,), (16,)]
    channels = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            shapes += [(width, channels, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            channels = width
    return [*shapes, (10, 64), (10,)]


def resnet50_shapes() -> Shapes:
    """List the parameter shapes of torchvision's ResNet-50, 25.6 million parameters."""
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in resnet50().parameters()]


class PeakMemory(TorchDispatchMode):
    """Follows the most bytes, alive at a time, of tensors that operations create while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in inputs and id(tensor) not in self._live:
                self._live[id(tensor)] = tensor.nbytes
                weakref.finalize(tensor, self._live.pop, id(tensor), None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def make_parameters(shapes: Shapes, device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(device))
        parameter.grad = torch.randn(shape, generator=generator).to(device)
        parameters.append(parameter)
    return parameters


def state_bytes(optimizer: Optimizer) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def compare(shapes: Shapes, algorithm: str, rounds: int, device: str) -> list[tuple[str, float, int, int]]:
    """Measure name, median seconds of a step, bytes of state and of temporaries of each contestant."""
    optimizers = {
        name: make(make_parameters(shapes, device)) for name, make in CONTESTANTS[algorithm].items()
    }
    temporaries, samples = {}, {}
    for name, optimizer in optimizers.items():
        optimizer.step()  # makes the state
        with PeakMemory() as memory:
            optimizer.step()
        temporaries[name] = memory.peak
        sample = partial(seconds_of, optimizer.step, device=torch.device(device))
        samples[name] = partial(sample, max(1, round(SAMPLE_SECONDS / sample(3))))
    times = in_turns(samples, rounds)
    return [
        (name, statistics.median(times[name]), state_bytes(optimizer), temporaries[name])
        for name, optimizer in optimizers.items()
    ]


def report(rounds: int, device: str) -> str:
    """Run all comparisons and return them as Markdown; progress goes to the standard error."""
    models = {
        "ResNet-20": cifar_resnet_shapes(20),
        "ResNet-56": cifar_resnet_shapes(56),
        "ResNet-50": resnet50_shapes(),
    }
    lines = []
    for model, shapes in models.items():
        size = sum(torch.Size(shape).numel() for shape in shapes)
        for algorithm in CONTESTANTS:
            say(f"{model}, {algorithm} ...")
            rows = compare(shapes, algorithm, rounds, device)
            reference = next(seconds for name, seconds, _, _ in rows if name == "torch foreach")
            lines += [
                (
                    f"{model} ({len(shapes)} tensors, {size / 1e6:.2f} M)",
                    name if name.startswith("Onnx") else f"{algorithm}, {name}",
                    f"{seconds * 1e3:.3f}",
                    f"{seconds / reference:.2f}",
                    f"{state / 2**20:.2f}",
                    f"{temporary / 2**20:.2f}",
                )
                for name, seconds, state, temporary in rows
            ]
    head = ("model", "optimizer", "ms per step", "time ÷ torch foreach", "state, MiB", "temporary, MiB")
    return markdown(head, lines, left=range(2))


def main() -> None:
    """Run the comparisons, print and perhaps save the table."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="rounds per comparison (default 31)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: give at least 1")
    table = report(options.rounds, options.device)
    text = f"Medians of {options.rounds} interleaved rounds.\n\n{table}"
    publish(text, options.output, section="bench_optim", title="Optimizer steps")


if __name__ == "__main__":
    main()
