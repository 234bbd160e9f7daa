"""Low ranks for linear layers: what each published weighting of the error keeps, at the same ranks.

    python scripts/bench_linear.py --network net.onnx --inputs fitting.npz --test testing.npz --output FILE.md

All Gemm and MatMul nodes of the file with a constant weight get the largest rank at which their two factors
hold the asked share of the weight; a method is what it weighs errors by:

- SVD: nothing (Eckart & Young 1936);
- FWSVD (Hsu et al., ICLR 2022): every output by its Fisher information, here the diagonal of G;
- ASVD (Yuan et al. 2023): every input by the square root of its mean size;
- DRONE, SVD-LLM (Chen et al., NeurIPS 2021; Wang et al., ICLR 2025): the second moments S of the inputs;
- inputs and outputs: S, and the sensitivity G of the network's outputs, measured by forward passes;
- the same with S as far as the inputs determine it (Ledoit & Wolf 2004), which is what rankrl fits in;
- the same as a pivoting factorisation (Zhao et al. 2025), which has a higher rank in as many numbers.

The table says what the layers lose of their outputs on test inputs (mean relative error), and how often
the network is right there, or agrees with the original where there are no labels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from decomposition.calibration.metric import Metric, times
from decomposition.calibration.moments import InputMoments
from decomposition.fit.low_rank import LowRank
from decomposition.formats import get_format
from decomposition.network.kinds import weight_of
from decomposition.network.modes import plain_modes
from rankrl.networks.graph import measured_sensitivities
from rankrl.onnx.graph import PreparedFile, Site
from rankrl.onnx.graph.capture import Captured, collect_moments
from rankrl.onnx.graph.inputs import checked
from rankrl.onnx.graph.network import GraphSession
from rankrl.onnx.graph.rewrite import open_constants
from rankrl.onnx.graph_edits import without_unused
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line

Array = np.ndarray[Any, np.dtype[Any]]
_RUN_AT_ONCE = 50


@dataclass(frozen=True)
class Layer:
    """A linear layer and what is known of its inputs and outputs.

    Attributes:
        site: The node.
        weight: W (out, in), float64.
        moments: Of its inputs, around zero.
        size: Mean size of each input, E|x|.
        sensitivity: G (out, out), or None where the outputs do not react.
    """

    site: Site
    weight: torch.Tensor
    moments: InputMoments
    size: torch.Tensor
    sensitivity: torch.Tensor | None

    @property
    def inputs(self) -> Metric:
        """S (in, in) as it was measured."""
        return self.moments.second_moment

    def rank(self, kept: float, *, pivoted: bool = False) -> int:
        """Return the largest rank at which the factors hold at most a share of the weight."""
        tensor_format, modes = get_format("pifa" if pivoted else "tucker"), plain_modes(self.site.spec)
        ranks = range(1, tensor_format.max_rank(modes) + 1)
        most = kept * self.weight.numel()
        return max(rank for rank in ranks if rank == 1 or tensor_format.params(modes, (rank,)) <= most)


Method = Callable[[Layer], LowRank]


def _fisher(layer: Layer) -> torch.Tensor | None:
    return None if layer.sensitivity is None else torch.diag(layer.sensitivity.diagonal())


_FITTED = "the same, shrunk"
PIVOTED = f"{_FITTED}, pivoted"
METHODS: Mapping[str, Method] = {
    "SVD": lambda layer: LowRank(layer.weight, None, None),
    "FWSVD": lambda layer: LowRank(layer.weight, None, _fisher(layer)),
    "ASVD": lambda layer: LowRank(layer.weight, torch.diag(layer.size.clamp_min(1e-9)), None),
    "DRONE, SVD-LLM": lambda layer: LowRank(layer.weight, layer.inputs, None),
    "inputs and outputs": lambda layer: LowRank(layer.weight, layer.inputs, layer.sensitivity),
    _FITTED: lambda layer: LowRank(layer.weight, layer.moments.metric(centred=False), layer.sensitivity),
}
"""ASVD scales the columns by E|x|^1/2, so that its S is the diagonal of E|x|."""


def linear_layers(file: PreparedFile, seed: int = 0) -> list[Layer]:
    """Return the linear layers of a file, calibrated on its inputs."""
    sites = [site for site in file.usable if site.spec.kind == "linear"]
    moments = collect_moments(file.network, sites, file.split.calibration, seed=seed)
    sensitivities = measured_sensitivities(file, seed=seed)
    sizes = _mean_sizes(file, sites)
    return [
        Layer(
            site,
            weight_of(site.module()).squeeze(-1),
            moments[site.name],
            sizes[site.name],
            sensitivities.get(site.name),
        )
        for site in sites
    ]


def _mean_sizes(file: PreparedFile, sites: Sequence[Site]) -> dict[str, torch.Tensor]:
    session = Captured(file.network.graph_model(), [site.input_name for site in sites], file.network.source)
    sums: dict[str, Array] = {}
    for feed in file.split.calibration:
        values = session.run(feed)
        for site in sites:
            rows = values[site.input_name].reshape(-1, site.spec.in_channels)
            sums[site.name] = sums.get(site.name, 0) + np.abs(rows).mean(0, dtype=np.float64)
    return {name: torch.from_numpy(total / len(file.split.calibration)) for name, total in sums.items()}


class Tested:
    """A network that takes on other weights, and the inputs that it is tested on.

    Args:
        file: The network.
        layers: Its linear layers.
        inputs: Test inputs, one array for each input of the network.
        labels: Their classes, or None for those that the original chooses.
    """

    def __init__(
        self, file: PreparedFile, layers: Sequence[Layer], inputs: Mapping[str, Array], labels: Array | None
    ) -> None:
        self.network, self.inputs = file.network, checked(inputs, file.network)
        model = file.network.graph_model()
        self._open = {each.site.name: open_constants(model, each.site) for each in layers}
        self._model = ir.to_proto(without_unused(model))
        self._constants = {each.name: each for each in self._model.graph.initializer}
        self._weights = {each.site.name: each.weight for each in layers}
        self.labels = self._answers() if labels is None else labels
        batches = list(self._batches())
        self._metrics = {
            name: each.second_moment
            for name, each in collect_moments(file.network, [each.site for each in layers], batches).items()
        }

    def accuracy(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Return the share of test inputs in their class under other weights, by the names of the nodes."""
        for name, weight in {**self._weights, **weights}.items():
            written = (weight.T if self._open[name].turned else weight).numpy()
            self._constants[self._open[name].weight].raw_data = written.astype(np.float32).tobytes()
        return float((self._answers() == self.labels).mean())

    def error(self, name: str, weight: torch.Tensor) -> float:
        """Return the relative error of a layer's outputs on the test inputs that reach it."""
        dense, metric = self._weights[name], self._metrics[name]

        def power(rows: torch.Tensor) -> float:
            return float((times(rows, metric) * rows).sum().clamp_min(0))

        return (power(dense - weight) / power(dense)) ** 0.5

    def _answers(self) -> Array:
        session = GraphSession(self._model, self.network.source)
        return np.concatenate([session.run(feed)[0].argmax(1) for feed in self._batches()])

    def _batches(self) -> Iterator[dict[str, Array]]:
        count = len(next(iter(self.inputs.values())))
        for first in range(0, count, _RUN_AT_ONCE):
            yield {name: value[first : first + _RUN_AT_ONCE] for name, value in self.inputs.items()}


def table(layers: Sequence[Layer], tested: Tested, kept: Sequence[float]) -> list[str]:
    """Return the rows of a table: for each method error and accuracy at each share of the weights."""
    lines = []
    for name, method in {**METHODS, PIVOTED: METHODS[_FITTED]}.items():
        solved = {layer.site.name: (layer, method(layer)) for layer in layers}
        cells = []
        for share in kept:
            weights = {
                key: torch.matmul(*solution.halves(layer.rank(share, pivoted=name == PIVOTED)))
                for key, (layer, solution) in solved.items()
            }
            error = float(np.mean([tested.error(key, weight) for key, weight in weights.items()]))
            cells.append(f"{error:.3f} / {100 * tested.accuracy(weights):.1f} %")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True, help=".npz of inputs to fit to")
    parser.add_argument("--test", type=Path, required=True, help=".npz of inputs to test on")
    parser.add_argument("--labels", default="labels", help="array of classes in it")
    parser.add_argument("--kept", nargs="+", type=float, default=[0.8, 0.6, 0.4, 0.3])
    parser.add_argument("--counts", nargs="+", type=int, default=[32, 500], help="inputs to fit to")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    fitting, testing = (dict(np.load(path)) for path in (options.inputs, options.test))
    shortened = {str(path): path.name for path in (options.network, options.inputs, options.test)}
    command = shown_command(sys.argv, shortened=shortened, dropped=("--output",))
    lines = [f"`{command}`, {hardware_line()}."]
    for count in options.counts:
        # One input is held out, as everywhere; it is not used.
        names = [name for name in fitting if name != options.labels]
        some = {name: fitting[name][: count + 1] for name in names}
        file = PreparedFile.read(options.network, some, heldout=1e-9, look_ups=False)
        layers = linear_layers(file)
        inputs = {name: testing[name] for name in names}
        tested = Tested(file, layers, inputs, testing.get(options.labels))
        size = sum(layer.weight.numel() for layer in layers)
        lines.append(
            f"\n{options.network.stem}: {len(layers)} linear layers of {size:,} of {file.totals['params']:,} "
            f"parameters, fitted to {count} inputs, tested on {len(tested.labels)} (the original: "
            f"{100 * tested.accuracy({}):.1f} %).\n"
        )
        lines.append(f"| kept | {' | '.join(f'{share:.0%}' for share in options.kept)} |")
        lines.append("|---" + "|---:" * len(options.kept) + "|")
        print("\n".join(lines[-3:]), flush=True)
        lines += table(layers, tested, options.kept)
    if options.output:
        name = f"bench_linear_{options.network.stem}"
        write_section(options.output, name, f"Linear layers of {options.network.stem}", "\n".join(lines))


if __name__ == "__main__":
    main()
