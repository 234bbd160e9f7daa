"""Factorise a layer's weight: the layer becomes the cores of a tensor format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import nn

from decomposition.errors import PlanError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.fitting import fit_weight
from decomposition.fit.refit import RefitProblem
from decomposition.formats import Ranks, TensorFormat, get_format, list_formats
from decomposition.formats.layers import FactorisedLayer
from decomposition.network.layers import DecomposableModule, LayerSpec
from decomposition.network.modes import WeightModes, modes_from_dict
from decomposition.operations.operation import Cost, FittedLayer, LayerOperation, register_operation


class ChannelFactors(NamedTuple):
    """Small factors into which channel counts are split (tensorised weights).

    Attributes:
        out: Factors of the output channels.
        inp: Factors of the input channels.
    """

    out: tuple[int, ...]
    inp: tuple[int, ...]


@register_operation
@dataclass(frozen=True)
class Factorise(LayerOperation):
    """Write the weight as the cores of a tensor format.

    Attributes:
        format: Name of the tensor format.
        ranks: One rank a bond of the format.
        factors: How channel counts are split; `None` when they are not.
    """

    format: str
    ranks: Ranks
    factors: ChannelFactors | None = None

    kind: ClassVar[str] = "factorise"
    description: ClassVar[str] = "write the weight as the cores of a tensor format"
    stage: ClassVar[int] = 10

    def __str__(self) -> str:
        return f"{self.format} {', '.join(map(str, self.ranks))}"

    @property
    def tensor_format(self) -> TensorFormat:
        return get_format(self.format)

    def modes(self, spec: LayerSpec) -> WeightModes:
        return modes_from_dict(spec, None if self.factors is None else _as_dict(self.factors))

    def check(self, spec: LayerSpec) -> None:
        if spec.refusal is not None:
            raise PlanError(f"layer {spec.name!r} cannot be decomposed: {spec.refusal}")
        self.tensor_format.check_ranks(self.modes(spec), self.ranks, spec.name)

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        modes, bias = self.modes(spec), spec.out_channels if spec.bias else 0
        params = self.tensor_format.params(modes, self.ranks) + bias
        macs = self.tensor_format.macs(spec, modes, self.ranks)
        rows = self.tensor_format.rows(spec, modes, self.ranks)
        return Cost(params, macs, spec.bytes_of(params), rows=rows)

    def structure(self, module: nn.Module, spec: LayerSpec) -> FactorisedLayer:
        dense = cast(DecomposableModule, module)
        layer = self.tensor_format.build(dense, spec, self.modes(spec), self.ranks)
        layer.freeze_like(dense.weight, dense.bias)
        return layer.train(dense.training)

    def fit(
        self,
        module: nn.Module,
        spec: LayerSpec,
        problem: RefitProblem,
        *,
        sensitivity: torch.Tensor | None,
        options: FitOptions,
    ) -> FittedLayer:
        layer = self.structure(module, spec)
        fit = fit_weight(
            layer.tensor_format,
            problem.target,
            layer.modes,
            self.ranks,
            problem.metric,
            options,
            sensitivity=sensitivity,
            start=problem.start,
        )
        layer.load(fit.cores, cast(DecomposableModule, module).bias, fit.error)
        weight = layer.to_dense().weight.detach()
        return FittedLayer(layer, weight.double().cpu().reshape(*weight.shape[:2], -1))

    def values(self) -> dict[str, Any]:
        content: dict[str, Any] = {"format": self.format, "ranks": list(self.ranks)}
        if self.factors is not None:
            content["factors"] = _as_dict(self.factors)
        return content

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        name, ranks, factors = values["format"], values["ranks"], values.get("factors")
        if name not in list_formats():
            raise PlanError(f"{where}: unknown format {name!r}; choose from {', '.join(list_formats())}")
        if not _are_counts(ranks):
            raise PlanError(f"{where}: ranks must be a list of integers of at least 1, got {ranks!r}")
        if factors is None:
            return cls(name, tuple(ranks))
        if not (
            isinstance(factors, dict)
            and set(factors) == {"out", "in"}
            and all(map(_are_counts, factors.values()))
        ):
            raise PlanError(f"{where}: factors must be {{'out': [...], 'in': [...]}}, got {factors!r}")
        return cls(name, tuple(ranks), ChannelFactors(tuple(factors["out"]), tuple(factors["in"])))


def factors_of(modes: WeightModes) -> ChannelFactors | None:
    """Return the channel factors of a weight's modes; `None` when no channel count is split."""
    return None if modes.plain else ChannelFactors(modes.out, modes.inp)


def _as_dict(factors: ChannelFactors) -> dict[str, Any]:
    return {"out": list(factors.out), "in": list(factors.inp)}


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(n) is int and n >= 1 for n in values)
