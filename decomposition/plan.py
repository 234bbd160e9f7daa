"""The compression plan: what becomes of every layer, as versioned JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from decomposition.errors import PlanError
from decomposition.files import replacing
from decomposition.formats import Ranks, get_format, list_formats
from decomposition.layers import LayerSpec, inspect_layers
from decomposition.modes import WeightModes, modes_from_dict

PLAN_VERSION = 1
_PLAN_KEYS = {"version", "fingerprint", "input_shape", "chosen_by", "layers"}
_LAYER_KEYS = {"name", "format", "ranks", "factors", "reason"}


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer.

    Attributes:
        name: The layer's dotted name.
        format: Name of the tensor format; `None` keeps the layer dense.
        ranks: One rank a bond of the format; `()` when dense.
        factors: `{"out": [...], "in": [...]}` when channel counts are split (tensorised), else `None`.
        reason: Why the layer stays dense; `None` when it is decomposed.
    """

    name: str
    format: str | None = None
    ranks: Ranks = ()
    factors: Mapping[str, Sequence[int]] | None = None
    reason: str | None = None

    def modes(self, spec: LayerSpec) -> WeightModes:
        """Return how the layer's weight is read as a tensor."""
        return modes_from_dict(spec, dict(self.factors) if self.factors is not None else None)

    def params(self, spec: LayerSpec) -> int:
        """Count the layer's parameters under this entry, bias included."""
        if self.format is None:
            return spec.params
        bias = spec.out_channels if spec.bias else 0
        return get_format(self.format).params(self.modes(spec), self.ranks) + bias

    def macs(self, spec: LayerSpec) -> int:
        """Count the layer's multiply-accumulates for one model input under this entry."""
        if self.format is None:
            return spec.macs
        return get_format(self.format).macs(spec, self.modes(spec), self.ranks)


@dataclass(frozen=True)
class CompressionPlan:
    """A plan for one model.

    Attributes:
        layers: One entry for each layer that was considered, in forward order.
        fingerprint: Fingerprint of the model it was made for (`fingerprint`).
        input_shape: Shape of one model input without the batch axis; costs hold at this size.
        chosen_by: Who chose it, for example `greedy` or `ddpg`.
    """

    layers: tuple[LayerPlan, ...]
    fingerprint: str
    input_shape: tuple[int, ...]
    chosen_by: str = "user"

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> LayerPlan:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        layers = []
        for layer in self.layers:
            entry: dict[str, Any] = {"name": layer.name, "format": layer.format, "ranks": list(layer.ranks)}
            if layer.factors is not None:
                entry["factors"] = {side: list(values) for side, values in layer.factors.items()}
            if layer.reason is not None:
                entry["reason"] = layer.reason
            layers.append(entry)
        content = {
            "version": PLAN_VERSION,
            "fingerprint": self.fingerprint,
            "input_shape": list(self.input_shape),
            "chosen_by": self.chosen_by,
            "layers": layers,
        }
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> CompressionPlan:
        """Read a plan from JSON text; strict.

        Args:
            text: The JSON.
            source: Where it comes from, for messages.

        Raises:
            PlanError: If it is no JSON, of another version, or has missing, unknown or ill-typed entries.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{source} is no valid JSON ({error}); write it anew") from error
        if not isinstance(content, dict):
            raise PlanError(f"{source} must be a JSON object, got {type(content).__name__}")
        if content.get("version") != PLAN_VERSION:
            raise PlanError(
                f"{source} has version {content.get('version')!r}; this release reads version {PLAN_VERSION}"
            )
        _check_keys(content, _PLAN_KEYS, _PLAN_KEYS, source)
        shape = content["input_shape"]
        if not (isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape)):
            raise PlanError(f"{source}: input_shape must be a list of positive integers, got {shape!r}")
        for key in ("fingerprint", "chosen_by"):
            if not isinstance(content[key], str):
                raise PlanError(f"{source}: {key} must be a string, got {content[key]!r}")
        if not isinstance(content["layers"], list):
            raise PlanError(f"{source}: layers must be a list, got {type(content['layers']).__name__}")
        layers = tuple(_read_layer(entry, source) for entry in content["layers"])
        names = [layer.name for layer in layers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"{source} names layers twice: {', '.join(twice)}; keep one entry each")
        return cls(layers, content["fingerprint"], tuple(shape), content["chosen_by"])

    def save(self, path: str | Path) -> None:
        """Write the plan to `path`, atomically."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CompressionPlan:
        """Read a plan from a file.

        Raises:
            PlanError: If the file is missing or is no valid plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan {path} cannot be read ({error}); check the path") from error
        return cls.from_json(text, source=f"the plan {path}")

    def specs(self, model: nn.Module) -> list[LayerSpec]:
        """Return the specs of the plan's layers in `model`, after checking that the plan fits it.

        Raises:
            PlanError: If the plan was made for another model, names a layer it does not have, or one that
                cannot be decomposed.
            DecompositionError: If a rank is not feasible.
        """
        by_name = {spec.name: spec for spec in inspect_layers(model, self.input_shape)}
        found = fingerprint(by_name.values())
        missing = [layer.name for layer in self.layers if layer.name not in by_name]
        if missing:
            raise PlanError(
                f"the plan names layers that the model does not have: {', '.join(missing[:5])}; "
                "it was made for another model"
            )
        if found != self.fingerprint:
            raise PlanError(
                f"the plan was made for a model with fingerprint {self.fingerprint}, this one has {found}; "
                "load the dense model that the plan was made for"
            )
        for layer in self.layers:
            spec = by_name[layer.name]
            if layer.format is None:
                continue
            if spec.refusal is not None:
                raise PlanError(f"layer {layer.name!r} cannot be decomposed: {spec.refusal}")
            get_format(layer.format).check_ranks(layer.modes(spec), layer.ranks, layer.name)
        return [by_name[layer.name] for layer in self.layers]


def fingerprint(specs: Any) -> str:
    """Hash what a plan depends on: names, kinds and shapes of all layers, not their weights.

    Args:
        specs: The `LayerSpec`s of `inspect_layers`.

    Returns:
        16 hexadecimal digits.
    """
    text = json.dumps(
        sorted([s.name, s.kind, list(s.weight_shape), list(s.stride), s.groups, s.bias] for s in specs)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(
    model: nn.Module,
    input_shape: Sequence[int],
    tensor_format: str,
    ranks: int | Mapping[str, int | Sequence[int]],
    *,
    tensorised: bool = False,
    chosen_by: str = "user",
) -> CompressionPlan:
    """Make a plan from ranks given by hand.

    Args:
        model: The dense model.
        input_shape: Shape of one input without the batch axis.
        tensor_format: Name of the format.
        ranks: One rank for every compressible layer (capped at each layer's maximum), or ranks by layer name:
            one integer, or one a bond. Layers that are not named stay dense.
        tensorised: Split channel counts into small factors.
        chosen_by: Recorded in the plan.

    Returns:
        The plan; a layer that would get no smaller stays dense, with the reason.

    Raises:
        DecompositionError: If a rank is not feasible.
        PlanError: If a name is no compressible layer of the model.
    """
    all_specs = inspect_layers(model, input_shape)
    chosen = get_format(tensor_format)
    by_name = {spec.name: spec for spec in all_specs}
    if isinstance(ranks, Mapping):
        for name in ranks:
            spec = by_name.get(name)
            if spec is None or spec.refusal is not None:
                compressible = ", ".join(s.name for s in all_specs if s.refusal is None)
                why = f": {spec.refusal}" if spec is not None else ""
                raise PlanError(f"{name!r} is no compressible layer{why}; choose from {compressible}")
    layers = []
    for spec in all_specs:
        if spec.refusal is not None:
            layers.append(LayerPlan(spec.name, reason=spec.refusal))
            continue
        modes = chosen.modes(spec, tensorised=tensorised)
        if isinstance(ranks, Mapping):
            if spec.name not in ranks:
                layers.append(LayerPlan(spec.name, reason="no rank was given"))
                continue
            wanted = ranks[spec.name]
            wanted = tuple(wanted) if isinstance(wanted, Sequence) else wanted
        else:
            wanted = min(ranks, chosen.max_rank(modes)) if type(ranks) is int else ranks
        checked = chosen.check_ranks(modes, wanted, spec.name)
        factors = None if modes.plain else modes.to_dict()
        layers.append(without_growth(LayerPlan(spec.name, tensor_format, checked, factors), spec))
    return CompressionPlan(tuple(layers), fingerprint(all_specs), tuple(input_shape), chosen_by)


def without_growth(layer: LayerPlan, spec: LayerSpec) -> LayerPlan:
    """Return the entry, or a dense one with the reason if the layer would get no smaller."""
    if layer.format is None or layer.params(spec) < spec.params:
        return layer
    reason = (
        f"{layer.format} ranks {list(layer.ranks)} take {layer.params(spec)} parameters, "
        f"no fewer than the dense {spec.params}"
    )
    return replace(LayerPlan(layer.name), reason=reason)


def _check_keys(entry: Mapping[str, Any], allowed: set[str], required: set[str], source: str) -> None:
    unknown, missing = sorted(set(entry) - allowed), sorted(required - set(entry))
    if unknown or missing:
        raise PlanError(
            f"{source}: unknown entries {unknown}, missing entries {missing}; allowed: {sorted(allowed)}"
        )


def _read_layer(entry: Any, source: str) -> LayerPlan:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise PlanError(f"{source}: every layer must be an object with a name, got {entry!r}")
    where = f"{source}, layer {entry['name']!r}"
    _check_keys(entry, _LAYER_KEYS, {"name", "format", "ranks"}, where)
    name, chosen, ranks, factors = entry["name"], entry["format"], entry["ranks"], entry.get("factors")
    if chosen is not None and chosen not in list_formats():
        raise PlanError(
            f"{where}: unknown format {chosen!r}; choose from {', '.join(list_formats())} or null"
        )
    if not isinstance(ranks, list) or any(type(rank) is not int or rank < 1 for rank in ranks):
        raise PlanError(f"{where}: ranks must be a list of integers of at least 1, got {ranks!r}")
    if (chosen is None) != (not ranks):
        raise PlanError(f"{where}: a decomposed layer needs ranks and a dense one has none, got {ranks!r}")
    if factors is not None:
        good = isinstance(factors, dict) and set(factors) == {"out", "in"}
        if not good or not all(
            isinstance(side, list) and side and all(type(n) is int and n > 0 for n in side)
            for side in factors.values()
        ):
            raise PlanError(f"{where}: factors must be {{'out': [...], 'in': [...]}}, got {factors!r}")
    reason = entry.get("reason")
    if reason is not None and not isinstance(reason, str):
        raise PlanError(f"{where}: reason must be text, got {reason!r}")
    return LayerPlan(name, chosen, tuple(ranks), factors, reason)
