"""Define compression plans: the operations on every layer, as versioned JSON."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from decomposition.errors import DecompositionError, PlanError
from decomposition.files import replacing
from decomposition.formats import get_format
from decomposition.network.inputs import ExampleInputs, InputShape, InputSpec, input_shape_of, shape_to_json
from decomposition.network.layers import OPAQUE_KINDS, LayerSpec, inspect_layers
from decomposition.network.surgery import unwrapped
from decomposition.operations import (
    Cost,
    Factorise,
    GroupOperation,
    LayerOperation,
    Operation,
    check_keys,
    dense_cost,
    factors_of,
    operation_from_dict,
)
from decomposition.public_calls import public_call
from decomposition.rewrites import REWRITERS, Rewrite, prepared, rewrites_of


def checked_metadata(metadata: Any, source: str) -> dict[str, Any]:
    """Return a copy of metadata that survives JSON unchanged."""
    if not isinstance(metadata, dict):
        raise PlanError(f"{source}: metadata must be an object, got {type(metadata).__name__}")
    copied: dict[str, Any] = _checked(metadata, source, "metadata")
    return copied


def _checked(value: Any, source: str, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [_checked(entry, source, f"{name}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise PlanError(f"{source}: {name} has the key {key!r}; keys of metadata must be text")
        return {key: _checked(entry, source, f"{name}[{key!r}]") for key, entry in value.items()}
    raise PlanError(
        f"{source}: {name} is {value!r}; metadata holds what JSON can: text, finite numbers, booleans, null, "
        "and lists and dictionaries of them"
    )


_KEYS = {"name", "operations", "reason"}
_Kind = TypeVar("_Kind", bound=Operation)


@dataclass(frozen=True)
class LayerPlan:
    """A plan's entry for one layer.

    Costs are counted from the layer as the plan's group operations leave it.

    Attributes:
        name: The layer's dotted name.
        operations: What is done with it, applied left to right; empty for a layer that stays as it is.
        reason: Why nothing is done with it.
    """

    name: str
    operations: tuple[Operation, ...] = ()
    reason: str | None = None

    def __post_init__(self) -> None:
        for left, right in pairwise(self.operations):
            if left.stage < right.stage:
                continue
            ordered = " before ".join(
                repr(operation.kind) for operation in sorted((left, right), key=lambda o: o.stage)
            )
            allowed = "one operation of a kind" if left.kind == right.kind else ordered
            raise PlanError(
                f"layer {self.name!r}: operation {right.kind!r} stands after {left.kind!r}; "
                f"a layer takes {allowed}"
            )
        leaving = next((operation for operation in self.group_operations if operation.removes), None)
        if leaving is not None and len(self.operations) > 1:
            raise PlanError(
                f"layer {self.name!r}: operation {leaving.kind!r} removes the layer; it takes no other one"
            )

    @property
    def layer_operations(self) -> tuple[LayerOperation, ...]:
        """The operations on this layer alone."""
        return tuple(operation for operation in self.operations if isinstance(operation, LayerOperation))

    @property
    def group_operations(self) -> tuple[GroupOperation, ...]:
        """The operations on this layer together with others."""
        return tuple(operation for operation in self.operations if isinstance(operation, GroupOperation))

    def operation(self, kind: type[_Kind]) -> _Kind | None:
        """Return the layer's operation of a class, or `None`."""
        return next((operation for operation in self.operations if isinstance(operation, kind)), None)

    def cost(self, spec: LayerSpec) -> Cost:
        """Return the layer's cost under its operations."""
        return total_cost(self.operations, spec)


def total_cost(operations: Sequence[Operation], spec: LayerSpec) -> Cost:
    """Return a layer's cost under operations applied left to right; without any, the dense layer's."""
    cost = dense_cost(spec)
    for operation in operations:
        cost = operation.cost(spec, cost)
    return cost


def without_growth(layer: LayerPlan, spec: LayerSpec) -> LayerPlan:
    """Replace an entry's factorisation by a reason if it saves no parameters."""
    factorisation = layer.operation(Factorise)
    if factorisation is None:
        return layer
    params = factorisation.cost(spec, dense_cost(spec)).params
    if params < spec.params:
        return layer
    reason = (
        f"{factorisation.format} ranks {list(factorisation.ranks)} take {params} parameters, "
        f"no fewer than the dense {spec.params}"
    )
    return LayerPlan(
        layer.name,
        tuple(operation for operation in layer.operations if operation is not factorisation),
        reason,
    )


def to_entry(layer: LayerPlan) -> dict[str, Any]:
    """Return the entry as plain values for JSON; what is not set is left out."""
    entry: dict[str, Any] = {
        "name": layer.name,
        "operations": [operation.to_dict() for operation in layer.operations],
    }
    if layer.reason is not None:
        entry["reason"] = layer.reason
    return entry


def from_entry(entry: Any, source: str) -> LayerPlan:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise PlanError(f"{source}: every layer must be an object with a name, got {entry!r}")
    where = f"{source}, layer {entry['name']!r}"
    check_keys(entry, _KEYS, _KEYS - {"reason"}, where)
    operations, reason = entry["operations"], entry.get("reason")
    if not isinstance(operations, list):
        raise PlanError(f"{where}: operations must be a list, got {operations!r}")
    if reason is not None and not isinstance(reason, str):
        raise PlanError(f"{where}: reason must be text, got {reason!r}")
    read = tuple(operation_from_dict(content, where) for content in operations)
    try:
        return LayerPlan(entry["name"], read, reason)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from error


PLAN_VERSION = 3
_PLAN_KEYS = {"version", "fingerprint", "input_shape", "chosen_by", "layers"}
# JSON strings hold no line breaks (they are escaped as \\n), so this matches lists only.
_INTEGERS = re.compile(r"(?<=\[)\n *\d+(?:,\n *\d+)*\n *(?=\])")

RunGroup = Callable[[type[GroupOperation], nn.Module, Mapping[str, GroupOperation]], nn.Module]
"""Applies a group operation, or makes its structure: (kind, model, operation by layer) -> model."""


@dataclass(frozen=True)
class CompressionPlan:
    """A plan for one model.

    Group operations come first; operations on single layers apply to the network that they leave.

    Attributes:
        layers: One entry for each layer that was considered, in forward order.
        fingerprint: Fingerprint of the model it was made for (`fingerprint`).
        input_shape: Shape of one model input without the batch axis, or the specification of what else the
            model takes; costs hold at this size.
        chosen_by: Who chose it, for example `greedy` or `ddpg`.
        metadata: Anything else to keep with the plan and the networks saved with it, such as how the model's
            inputs are made: JSON values by name. Nothing here reads it.
        preparation: Rewrites of the model before the plan (`plain_attention` and the like). They are repeated
            on a model fresh from its class.
    """

    layers: tuple[LayerPlan, ...]
    fingerprint: str
    input_shape: InputShape
    chosen_by: str = "user"
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    preparation: tuple[Rewrite, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", checked_metadata(self.metadata, "the plan"))

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> LayerPlan:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def chosen(self, kind: type[_Kind]) -> dict[str, _Kind]:
        """Return the operations of a class, by layer name."""
        operations = {layer.name: layer.operation(kind) for layer in self.layers}
        return {name: operation for name, operation in operations.items() if operation is not None}

    @property
    def group_kinds(self) -> list[type[GroupOperation]]:
        """The classes of the plan's group operations, in the order in which they are applied."""
        kinds = {type(operation) for layer in self.layers for operation in layer.group_operations}
        return sorted(kinds, key=lambda kind: kind.stage)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        content: dict[str, Any] = {
            "version": PLAN_VERSION,
            "fingerprint": self.fingerprint,
            "input_shape": shape_to_json(self.input_shape),
            "chosen_by": self.chosen_by,
        }
        if self.metadata:
            content["metadata"] = self.metadata
        if self.preparation:
            content["preparation"] = [rewrite.to_dict() for rewrite in self.preparation]
        content["layers"] = [to_entry(layer) for layer in self.layers]
        # Ranks and channels stay on one line.
        return _INTEGERS.sub(lambda match: " ".join(match[0].split()), json.dumps(content, indent=2)) + "\n"

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
        except RecursionError as error:
            raise PlanError(f"{source} is nested too deeply to be a plan; write it anew") from error
        if not isinstance(content, dict):
            raise PlanError(f"{source} must be a JSON object, got {type(content).__name__}")
        version = content.get("version")
        if version != PLAN_VERSION:
            raise PlanError(
                f"{source} has version {version!r}; this release reads version {PLAN_VERSION}. Search, or "
                "write the plan, anew"
            )
        check_keys(content, _PLAN_KEYS | {"metadata", "preparation"}, _PLAN_KEYS, source)
        shape = _shape_from_json(content["input_shape"], source)
        for key in ("fingerprint", "chosen_by"):
            if not isinstance(content[key], str):
                raise PlanError(f"{source}: {key} must be a string, got {content[key]!r}")
        if not isinstance(content["layers"], list):
            raise PlanError(f"{source}: layers must be a list, got {type(content['layers']).__name__}")
        layers = tuple(from_entry(entry, source) for entry in content["layers"])
        names = [layer.name for layer in layers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"{source} names layers twice: {', '.join(twice)}; keep one entry each")
        metadata = checked_metadata(content.get("metadata", {}), source)
        entries = content.get("preparation", [])
        if not isinstance(entries, list):
            raise PlanError(f"{source}: preparation must be a list, got {entries!r}")
        preparation = tuple(Rewrite.from_dict(entry, REWRITERS, source) for entry in entries)
        return cls(layers, content["fingerprint"], shape, content["chosen_by"], metadata, preparation)

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
        path = Path(path)
        try:
            if path.exists() and not path.is_file():  # reading a pipe or device may never end
                raise PlanError(f"the plan {path} cannot be read (no regular file); check the path")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan {path} cannot be read ({error}); check the path") from error
        return cls.from_json(text, source=f"the plan {path}")

    def check_model(self, model: nn.Module) -> dict[str, LayerSpec]:
        """Return the specs of all layers of `model` by name, after checking that it is the plan's model.

        Raises:
            PlanError: If the plan was made for another model or names a layer that it does not have.
        """
        return self.check_specs(inspect_layers(self.prepared(model), self.input_shape))

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the plan's model from a fresh one: the same layers are rewritten as before the plan.

        Args:
            model: The model, rewritten or not; left untouched.

        Raises:
            DecompositionError: It has no layers, or one cannot be rewritten.
        """
        return prepared(unwrapped(model), self.preparation)

    def check_specs(self, specs: Iterable[LayerSpec]) -> dict[str, LayerSpec]:
        """Return all layers of a network by name, after checking that it is the plan's; see `check_model`."""
        by_name = {spec.name: spec for spec in specs}
        actual = fingerprint(by_name.values())
        # Older plans do not list recurrent layers and attention.
        known = {actual, fingerprint(spec for spec in by_name.values() if spec.kind not in OPAQUE_KINDS)}
        missing = [layer.name for layer in self.layers if layer.name not in by_name]
        if missing:
            raise PlanError(
                f"the plan names layers that the model does not have: {', '.join(missing[:5])}; "
                "it was made for another model"
            )
        if self.fingerprint not in known:
            raise PlanError(
                f"the plan was made for a model with fingerprint {self.fingerprint}, this one has {actual}; "
                "load the dense model that the plan was made for"
            )
        return by_name

    def specs(self, model: nn.Module) -> list[LayerSpec]:
        """Return the layers in the form that group operations leave, after checking every operation.

        Raises:
            PlanError: If the plan was made for another model, names a layer it does not have, or one that
                an operation cannot be applied to.
            DecompositionError: If a rank is not feasible.
        """
        model = self.prepared(model)
        self.check_model(model)

        def structure(
            kind: type[GroupOperation], network: nn.Module, operations: Mapping[str, GroupOperation]
        ) -> nn.Module:
            present = {spec.name: spec for spec in inspect_layers(network, self.input_shape)}
            for name, operation in operations.items():
                operation.check(present[name])
            return kind.group_structure(network, operations, self.input_shape)

        network, rest = self.after_groups(model, structure)
        by_name = {spec.name: spec for spec in inspect_layers(network, self.input_shape)}
        for layer in rest:
            for operation in layer.operations:
                operation.check(by_name[layer.name])
        return [by_name[layer.name] for layer in rest]

    def after_groups(self, model: nn.Module, run: RunGroup) -> tuple[nn.Module, CompressionPlan]:
        """Return the network that the group operations leave, and the rest of the plan for it.

        Args:
            model: The plan's model; left untouched.
            run: Carries out the operations of one kind and returns the network that they leave.
        """
        plan = self
        for kind in self.group_kinds:
            operations = plan.chosen(kind)
            model = run(kind, model, operations)
            layers = tuple(
                replace(layer, operations=tuple(o for o in layer.operations if type(o) is not kind))
                for layer in plan.layers
                if not (kind.removes and layer.name in operations)
            )
            specs = inspect_layers(model, plan.input_shape)
            plan = replace(plan, layers=layers, fingerprint=fingerprint(specs))
        return model, plan

    def with_operations(self, model: nn.Module, operations: Mapping[str, Operation]) -> CompressionPlan:
        """Return the plan for `model` that applies group operations first and this plan afterwards.

        Args:
            model: The network before those operations.
            operations: One for each layer that gets one, by name.

        Raises:
            PlanError: If a layer is missing in the plan or in the network, or has such an operation already.
        """
        specs = {spec.name: spec for spec in inspect_layers(model, self.input_shape)}
        layers = {layer.name: layer for layer in self}
        # Layers that the operations remove are not in this plan.
        layers |= {
            name: LayerPlan(name)
            for name, operation in operations.items()
            if name not in layers and operation.removes
        }
        unknown = [name for name in operations if name not in specs or name not in layers]
        if unknown:
            raise PlanError(f"operations are given for {', '.join(unknown)}, but the plan has no such layer")
        for name, operation in operations.items():
            layers[name] = replace(layers[name], operations=(operation, *layers[name].operations))
        order = [name for name in specs if name in layers]
        return replace(
            self, layers=tuple(layers[name] for name in order), fingerprint=fingerprint(specs.values())
        )


def fingerprint(specs: Any) -> str:
    """Hash what a plan depends on: names, kinds and shapes of all layers, but not their weights.

    Args:
        specs: The `LayerSpec`s of `inspect_layers`.

    Returns:
        16 hexadecimal digits.
    """
    text = json.dumps(
        sorted([s.name, s.kind, list(s.weight_shape), list(s.stride), s.groups, s.bias] for s in specs)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shape_from_json(content: Any, source: str) -> InputShape:
    if isinstance(content, list) and content and all(type(n) is int and n > 0 for n in content):
        return tuple(content)
    try:
        return InputSpec.from_json(content)
    except DecompositionError as error:
        raise PlanError(
            f"{source}: input_shape must be a list of positive integers, or tell of several inputs or types "
            f"({error})"
        ) from error


@public_call(values=False)
def make_plan(
    model: nn.Module,
    input_shape: ExampleInputs,
    tensor_format: str,
    ranks: int | Mapping[str, int | Sequence[int]],
    *,
    tensorised: bool = False,
    chosen_by: str = "user",
) -> CompressionPlan:
    """Make a plan from ranks given by hand.

    Args:
        model: The dense model.
        input_shape: Shape of one input without the batch axis, or a batch of inputs.
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
    form = get_format(tensor_format)
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
        modes = form.modes(spec, tensorised=tensorised)
        if isinstance(ranks, Mapping):
            if spec.name not in ranks:
                layers.append(LayerPlan(spec.name, reason="no rank was given"))
                continue
            layer_ranks = ranks[spec.name]
            layer_ranks = tuple(layer_ranks) if isinstance(layer_ranks, Sequence) else layer_ranks
        else:
            layer_ranks = min(ranks, form.max_rank(modes)) if type(ranks) is int else ranks
        checked = form.check_ranks(modes, layer_ranks, spec.name)
        operation = Factorise(tensor_format, checked, factors_of(modes))
        layers.append(without_growth(LayerPlan(spec.name, (operation,)), spec))
    return CompressionPlan(
        tuple(layers),
        fingerprint(all_specs),
        input_shape_of(input_shape),
        chosen_by,
        preparation=rewrites_of(unwrapped(model)),
    )
