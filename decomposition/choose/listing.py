"""List candidates of each layer: ranks of every format, precisions, input channels and removals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import numpy as np
from torch import nn

from decomposition.calibration.metric import Narrowing
from decomposition.choose.candidates import Candidate, CandidateSet
from decomposition.errors import DecompositionError
from decomposition.formats import Ranks, TensorFormat, get_format, list_formats
from decomposition.network.geometry import WeightModes
from decomposition.network.inputs import ExampleInputs
from decomposition.network.layers import FLOAT_BYTES, OPAQUE_KINDS, LayerSpec, inspect_layers, skipping
from decomposition.network.surgery import unwrapped
from decomposition.operations import (
    DYNAMIC,
    PRECISIONS,
    Cost,
    Factorise,
    Operation,
    Quantise,
    computes_in_integers,
    dense_cost,
    factors_of,
)
from decomposition.plan.plan import total_cost

# Shares of the energy below this are rounding errors.
_NOTHING = 1e-12


def candidate_ranks(
    tensor_format: TensorFormat,
    spec: LayerSpec,
    modes: WeightModes,
    *,
    limit: int = 16,
    multiple: int = 1,
    spectra: Sequence[np.ndarray] = (),
) -> list[Ranks]:
    """Return ranks that make the layer smaller, in ascending order of parameters.

    Args:
        tensor_format: The format.
        spec: The layer.
        modes: How its weight is read.
        limit: Candidates at most; where more ranks are feasible, a geometric grid of them.
        multiple: Each rank is a multiple of it or a bond's largest; a divisor where that is smaller. A
            processor computes with several channels at a time: ranks that leave none of them idle can be
            faster than smaller ones.
        spectra: For each bond, the energy that each rank adds, descending (`TensorFormat.spectra`). With
            them bonds get ranks of their own: the combinations that lose least, by the sum of the discarded
            energies, for their parameters. Without, all bonds share one rank up to their caps.

    Returns:
        Ranks a bond of every candidate; empty when no rank makes the layer smaller.

    Raises:
        DecompositionError: If `multiple` is less than 1.
    """
    if multiple < 1:
        raise DecompositionError(f"ranks are multiples of 1 or more, got multiple={multiple}")
    bias = spec.out_channels if spec.bias else 0
    if spectra:
        smaller = _efficient_ranks(tensor_format, modes, spectra, spec.params - bias, multiple)
    else:
        smaller = []
        for rank in _multiples(tensor_format.max_rank(modes), multiple):
            ranks = tensor_format.expand(modes, rank)
            if tensor_format.params(modes, ranks) + bias >= spec.params:
                break
            smaller.append(ranks)
    if len(smaller) <= limit:
        return smaller
    sizes = np.array([tensor_format.params(modes, ranks) for ranks in smaller], dtype=float)
    grid = np.geomspace(sizes[0], sizes[-1], limit)
    return [smaller[j] for j in sorted({int(np.abs(np.log(sizes / size)).argmin()) for size in grid})]


def _efficient_ranks(
    tensor_format: TensorFormat, modes: WeightModes, spectra: Sequence[np.ndarray], dense: int, multiple: int
) -> list[Ranks]:
    """Return all combinations of ranks below `dense` parameters that no smaller one beats, ascending."""
    lost = [
        np.maximum(energies.sum() - np.cumsum(energies), 0.0)[:largest]
        for energies, largest in zip(spectra, tensor_format.max_ranks(modes), strict=True)
    ]
    combinations = []
    for ranks in product(*(_multiples(len(losses), multiple) for losses in lost)):
        params = tensor_format.params(modes, ranks)
        if params < dense:
            combinations.append(
                (params, sum(losses[r - 1] for losses, r in zip(lost, ranks, strict=True)), ranks)
            )
    efficient: list[Ranks] = []
    least = float("inf")
    for _, loss, ranks in sorted(combinations):
        if loss < least - _NOTHING:
            least = loss
            efficient.append(ranks)
    return efficient


def _multiples(largest: int, multiple: int) -> list[int]:
    """Return the multiples up to `largest`, and `largest` itself; divisors where it is smaller."""
    if largest < multiple:
        return [rank for rank in range(1, largest + 1) if multiple % rank == 0 or rank == largest]
    return [rank for rank in range(1, largest + 1) if rank % multiple == 0 or rank == largest]


@dataclass(frozen=True)
class Removal:
    """The operation that removes a layer; `last` marks the last layer of its block."""

    operation: Operation
    last: bool


def whole_blocks(removals: Mapping[str, Removal], names: Sequence[str]) -> dict[str, Removal]:
    """Return the removals of blocks all of whose layers may change and are consecutive."""
    counts = Counter(removal.operation for removal in removals.values())
    whole: dict[str, Removal] = {}
    for operation, run in groupby(names, lambda name: removals[name].operation if name in removals else None):
        layers = list(run)
        if operation is not None and len(layers) == counts[operation]:
            whole.update({name: removals[name] for name in layers})
    return whole


# Singular values of a weight's unfoldings in a format, from which the format chooses a rank for each bond.
Spectra = Callable[[TensorFormat], Sequence[np.ndarray]]


class CandidateLister:
    """Lists the candidates of a network's layers from their shapes, without looking at weights."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        formats: str | Sequence[str],
        *,
        precisions: Sequence[str] = ("float32",),
        dense: Mapping[str, str] | None = None,
        unrounded: Collection[str] = (),
        floating: Collection[str] = (),
        tensorised: bool = False,
        as_nodes: bool = False,
        multiple: int = 1,
        narrowings: Mapping[str, Narrowing] | None = None,
        removals: Mapping[str, Removal] | None = None,
        norm_parameters: Mapping[str, int] | None = None,
    ) -> None:
        names = (formats,) if isinstance(formats, str) else tuple(formats)
        if not names:
            raise DecompositionError(f"no tensor format was given; choose from {', '.join(list_formats())}")
        unknown = [precision for precision in precisions if precision not in PRECISIONS]
        if unknown or not precisions:
            what = f"there is no precision {unknown[0]!r}" if unknown else "no precision was given"
            raise DecompositionError(f"{what}; choose from {', '.join(PRECISIONS)}")
        self.specs = {spec.name: spec for spec in specs}
        self.formats = tuple(get_format(name) for name in names)
        self.precisions = tuple(precisions)
        self.dense = dict(dense or {})
        self.unrounded, self.floating = frozenset(unrounded), frozenset(floating)
        self.multiple, self.as_nodes = multiple, as_nodes
        self.narrowings, self.removals = dict(narrowings or {}), dict(removals or {})
        self._norm_parameters = dict(norm_parameters or {})
        self._rounds: dict[tuple[str, str], set[bool]] = {}
        self._modes: dict[tuple[str, str], WeightModes] = {
            (spec.name, tensor_format.name): tensor_format.modes(spec, tensorised=tensorised)
            for spec in specs
            for tensor_format in self.formats
            if spec.kind not in OPAQUE_KINDS
        }

    @classmethod
    def of_network(
        cls,
        model: nn.Module,
        input_shape: ExampleInputs,
        formats: str | Sequence[str],
        *,
        skip: Sequence[str] = (),
        only: Sequence[str] = (),
        **options: Any,
    ) -> CandidateLister:
        model = unwrapped(model)
        specs = changing_layers(model, input_shape, skip, only)
        return cls(
            specs, formats, norm_parameters=count_norm_parameters(model, specs), **within(specs, options)
        )

    def modes(self, name: str, tensor_format: TensorFormat) -> WeightModes:
        """Return how a layer's weight is read as a tensor in one of the formats."""
        return self._modes[name, tensor_format.name]

    def candidates(self, name: str, *, limit: int = 16, spectra: Spectra | None = None) -> CandidateSet:
        """Return a layer's candidates and their costs; errors are 1 but for the dense layer's 0."""
        spec = self.specs[name]
        choices = [
            rounded
            for tensor_format in self._formats(name)
            for choice in self._choices(
                name, tensor_format, limit, () if spectra is None else spectra(tensor_format)
            )
            for rounded in self._rounded(name, choice)
        ]
        choices += self._rounded(name, Candidate((), dense_cost(spec), 0.0))
        choices += self._narrowed(name) + self._removed(name)
        reason = "the plan saves in other layers instead"
        if not choices:
            smaller = "only integers make" if self._only_rounded(name) else "no rank makes"
            reason = f"{smaller} it smaller"
        if name in self.dense:
            choices, reason = [], self.dense[name]
        dense = Candidate((), dense_cost(spec), 0.0, reason=reason)
        narrowing = self.narrowings.get(name)
        return CandidateSet(
            spec,
            tuple(
                replace(candidate, narrower=self._narrower(name, candidate))
                for candidate in (*choices, dense)
            ),
            producer=None if narrowing is None else narrowing.producer,
        )

    def left_out(self) -> dict[str, list[str]]:
        """Return, by format, the precisions that none of the candidates listed so far allows."""
        without = sorted(pair for pair, found in self._rounds.items() if found == {False})
        return {name: [pair[1] for pair in without if pair[0] == name] for name, _ in without}

    def _only_rounded(self, name: str) -> bool:
        """Tell whether a layer is an LSTM, which no format replaces, but which may compute in integers."""
        return self.specs[name].kind in OPAQUE_KINDS

    def _formats(self, name: str) -> list[TensorFormat]:
        """Return the formats that differ for a layer: equivalent products of two matrices count once."""
        if self._only_rounded(name):
            return []
        spec, formats = self.specs[name], list(self.formats)
        modes = {each.name: self.modes(name, each) for each in formats}
        if spec.kind.startswith("conv_transpose"):
            ranks = {each.name: each.expand(modes[each.name], 1) for each in formats}
            formats = [
                each for each in formats if each.form(spec, modes[each.name], ranks[each.name]).spreads
            ]
        if spec.kernel_elements > 1:
            return [each for each in formats if not each.two_matrices(modes[each.name])] or formats
        return [
            each
            for index, each in enumerate(formats)
            if not any(each.same_matrices(other, modes[each.name]) for other in formats[:index])
        ]

    def _choices(
        self, name: str, tensor_format: TensorFormat, limit: int, spectra: Sequence[np.ndarray]
    ) -> list[Candidate]:
        spec, modes = self.specs[name], self.modes(name, tensor_format)
        # A ring's channel counts are products of two bonds: two bonds of 4 make 16 channels.
        side = self.multiple ** (1 / tensor_format.bonds_in_channels)
        multiple = self.multiple if tensor_format.bonds_in_channels == 1 else 2 ** math.ceil(math.log2(side))
        ranks = candidate_ranks(tensor_format, spec, modes, limit=limit, multiple=multiple, spectra=spectra)
        if self.as_nodes:
            ranks = [rank for rank in ranks if tensor_format.form(spec, modes, rank).as_nodes]
        operations = [Factorise(tensor_format.name, rank, factors_of(modes)) for rank in ranks]
        return [
            Candidate((operation,), operation.cost(spec, dense_cost(spec)), 1.0, tensor_format.name)
            for operation in operations
        ]

    def _rounded(self, name: str, candidate: Candidate) -> list[Candidate]:
        """Return a candidate in every precision; a dense one only in those that change it."""
        spec, candidates = self.specs[name].narrowed(inputs=candidate.inputs), []
        for precision in self._precisions(name):
            rounding = PRECISIONS[precision]
            if self._only_rounded(name):
                rounding = tuple(replace(each, activations=DYNAMIC) for each in rounding)
            operations = (*candidate.operations, *rounding)
            if not operations:
                continue
            if rounding and candidate.operations:
                roundable = self._roundable(spec, candidate, rounding)
                self._rounds.setdefault((candidate.generator, precision), set()).add(roundable)
                if not roundable:
                    continue
            cost = candidate.cost
            for operation in rounding:
                cost = operation.cost(spec, cost)
            generator = candidate.generator or precision
            candidates.append(
                replace(candidate, operations=operations, cost=cost, error=1.0, generator=generator)
            )
        return candidates

    def _roundable(self, spec: LayerSpec, candidate: Candidate, rounding: Sequence[Quantise]) -> bool:
        """Tell whether the stages of a candidate's format support this rounding."""
        factors = [each for each in candidate.operations if isinstance(each, Factorise)]
        forms = [each.tensor_format.form(spec, each.modes(spec), each.ranks) for each in factors]
        integers = any(operation.integer for operation in rounding)
        return all(form.in_integers if integers else form.stored for form in forms)

    def _precisions(self, name: str) -> list[str]:
        if name in self.unrounded:
            return ["float32"]
        if self._only_rounded(name):
            return [each for each in self.precisions if computes_in_integers([each])]
        if name not in self.floating:
            return list(self.precisions)
        stored = ("int8_weights" if computes_in_integers([each]) else each for each in self.precisions)
        return list(dict.fromkeys(stored))

    def _narrowed(self, name: str) -> list[Candidate]:
        """Return the candidates that read only some input channels; fitting selects the channels."""
        narrowing, spec, candidates = self.narrowings.get(name), self.specs[name], []
        for level, count in enumerate(narrowing.counts if narrowing else (), start=1):
            cost = dense_cost(spec.narrowed(inputs=count))
            plain = Candidate((), cost, 1.0, "channels", reads=tuple(range(count)), level=level)
            candidates += [plain] * ("float32" in self.precisions) + self._rounded(name, plain)
        return candidates

    def _removed(self, name: str) -> list[Candidate]:
        """Return the candidates that remove the layer and its batch norm from the network."""
        if name not in self.removals:
            return []
        gone = self._norm_parameters.get(name, 0) * self.specs[name].out_channels
        cost = Cost(-gone, 0, -FLOAT_BYTES * gone)
        removed = Candidate((self.removals[name].operation,), cost, 1.0, "blocks")
        integers = computes_in_integers(self.precisions)
        return [removed] + [replace(removed, passes_int8_through=True)] * integers

    def _narrower(self, name: str, candidate: Candidate) -> tuple[Cost | None, ...]:
        """Return a candidate's cost for each number of its outputs that the next layer may read."""
        behind = next(
            (narrowing for narrowing in self.narrowings.values() if narrowing.producer == name), None
        )
        counts = behind.counts if behind else ()
        if candidate.removed is not None:
            return (None,) * len(counts)
        costs: list[Cost | None] = []
        for count in counts:
            spec = self.specs[name].narrowed(inputs=candidate.inputs, outputs=count)
            try:
                for operation in candidate.operations:
                    operation.check(spec)
            except DecompositionError:
                costs.append(None)  # the ranks exceed the narrower layer's maximum
                continue
            cost = total_cost(candidate.operations, spec)
            gone = self._norm_parameters.get(name, 0) * (self.specs[name].out_channels - count)
            costs.append(replace(cost, params=cost.params - gone, bytes=cost.bytes - FLOAT_BYTES * gone))
        return tuple(costs)


def changing_layers(
    model: nn.Module, input_shape: ExampleInputs, skip: Sequence[str], only: Sequence[str]
) -> list[LayerSpec]:
    """Return the layers of a network that may change, in forward order."""
    every = skipping(inspect_layers(model, input_shape), skip, only)
    specs = [spec for spec in every if spec.refusal is None]
    if not specs:
        reasons = "; ".join(f"{spec.name}: {spec.refusal}" for spec in every[:5])
        raise DecompositionError(
            f"the network has no layer that can be decomposed ({reasons or 'no convolution or linear layer'})"
        )
    return specs


def within(specs: Sequence[LayerSpec], options: Mapping[str, Any]) -> dict[str, Any]:
    """Restrict the narrowings and removals in a lister's options to these layers."""
    changing = {spec.name for spec in specs}
    narrowings: Mapping[str, Narrowing] = options.get("narrowings") or {}
    return {
        **options,
        "narrowings": {
            name: narrowing
            for name, narrowing in narrowings.items()
            if {name, narrowing.producer} <= changing
        },
        "removals": whole_blocks(options.get("removals") or {}, [spec.name for spec in specs]),
    }


def count_norm_parameters(model: nn.Module, specs: Sequence[LayerSpec]) -> dict[str, int]:
    """Count the parameters per channel of the batch norm behind each layer, by layer name."""
    modules = dict(model.named_modules())
    return {
        spec.name: sum(parameter.numel() for parameter in modules[spec.batch_norm].parameters())
        // spec.out_channels
        for spec in specs
        if spec.batch_norm
    }
