"""The compression plan: what becomes of every layer, as versioned JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from decomposition.errors import PlanError
from decomposition.files import replacing
from decomposition.formats import get_format
from decomposition.layer_plan import LayerPlan, check_keys, from_entry, to_entry, without_growth
from decomposition.layers import LayerSpec, inspect_layers

PLAN_VERSION = 1
PRUNING_VERSION = 2
"""The version of plans with kept channels; the others stay readable for releases that know only version 1."""
_PLAN_KEYS = {"version", "fingerprint", "input_shape", "chosen_by", "layers"}
_INTEGERS = re.compile(r"(?<=\[)\s+\d+(?:,\s+\d+)*\s+(?=\])")

__all__ = [
    "CompressionPlan",
    "LayerPlan",
    "fingerprint",
    "make_plan",
    "without_growth",
]


@dataclass(frozen=True)
class CompressionPlan:
    """A plan for one model.

    A plan with kept channels first removes the others, which only a package that knows how to (such as
    `pruning`) can do; `after_removal` is what is left of the plan then.

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

    @property
    def kept_channels(self) -> dict[str, list[int]]:
        """The output channels that stay, of every layer that loses some; empty if none does."""
        return {layer.name: list(layer.kept) for layer in self.layers if layer.kept is not None}

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        content = {
            "version": PRUNING_VERSION if self.kept_channels else PLAN_VERSION,
            "fingerprint": self.fingerprint,
            "input_shape": list(self.input_shape),
            "chosen_by": self.chosen_by,
            "layers": [to_entry(layer) for layer in self.layers],
        }
        # Ranks and channels belong on one line; in JSON a line break inside a text is written as \\n.
        return _INTEGERS.sub(lambda found: " ".join(found[0].split()), json.dumps(content, indent=2)) + "\n"

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
        if content.get("version") not in (PLAN_VERSION, PRUNING_VERSION):
            raise PlanError(
                f"{source} has version {content.get('version')!r}; this release reads versions "
                f"{PLAN_VERSION} and {PRUNING_VERSION}"
            )
        check_keys(content, _PLAN_KEYS, _PLAN_KEYS, source)
        shape = content["input_shape"]
        if not (isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape)):
            raise PlanError(f"{source}: input_shape must be a list of positive integers, got {shape!r}")
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
        if any(layer.kept is not None for layer in layers) != (content["version"] == PRUNING_VERSION):
            raise PlanError(
                f"{source} has version {content['version']}; version {PRUNING_VERSION} is for plans with "
                f"kept channels, version {PLAN_VERSION} for those without"
            )
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
        path = Path(path)
        try:
            if path.exists() and not path.is_file():  # a pipe or a device may never end
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
        return by_name

    def specs(self, model: nn.Module) -> list[LayerSpec]:
        """Return the specs of the plan's layers in `model`, after checking that the plan fits it.

        Raises:
            PlanError: If the plan was made for another model, names a layer it does not have, or one that
                cannot be decomposed; or if it holds kept channels.
            DecompositionError: If a rank is not feasible.
        """
        if self.kept_channels:
            raise PlanError(
                f"the plan removes channels from {len(self.kept_channels)} layers, which this function "
                "cannot do; use rankrl.carry_out(model, plan) and rankrl.load_compressed, or remove them "
                "yourself (pruning.remove_channels with plan.kept_channels) and go on with "
                "plan.after_removal(pruned)"
            )
        by_name = self.check_model(model)
        for layer in self.layers:
            spec = by_name[layer.name]
            if layer.format is None:
                continue
            if spec.refusal is not None:
                raise PlanError(f"layer {layer.name!r} cannot be decomposed: {spec.refusal}")
            get_format(layer.format).check_ranks(layer.modes(spec), layer.ranks, layer.name)
        return [by_name[layer.name] for layer in self.layers]

    def after_removal(self, pruned: nn.Module) -> CompressionPlan:
        """Return what is left of the plan for the network from which the other channels are removed.

        Args:
            pruned: The plan's model without the removed channels, layers under the same names.

        Raises:
            PlanError: If a layer is missing or has not the kept number of output channels.
        """
        specs = {spec.name: spec for spec in inspect_layers(pruned, self.input_shape)}
        for name, kept in self.kept_channels.items():
            found = specs[name].out_channels if name in specs else "none"
            if found != len(kept):
                raise PlanError(
                    f"layer {name!r} has {found} output channels, the plan keeps {len(kept)}; give the "
                    "network from which the plan's other channels are removed"
                )
        layers = tuple(replace(layer, kept=None) for layer in self.layers)
        return replace(self, layers=layers, fingerprint=fingerprint(specs.values()))

    def with_removal(self, dense: nn.Module, kept: Mapping[str, Sequence[int]]) -> CompressionPlan:
        """Return the plan for `dense` that removes channels and then does what this plan says.

        The inverse of `after_removal`.

        Args:
            dense: The network before the removal.
            kept: The sorted output channels that stay, by layer name; other layers keep all of theirs.

        Raises:
            PlanError: If a layer of `kept` is missing in the plan or in the network.
        """
        specs = {spec.name: spec for spec in inspect_layers(dense, self.input_shape)}
        unknown = [name for name in kept if name not in specs or name not in {each.name for each in self}]
        if unknown:
            raise PlanError(f"channels are kept in {', '.join(unknown)}, but the plan has no such layer")
        layers = tuple(
            replace(layer, kept=tuple(kept[layer.name]))
            if len(kept.get(layer.name, ())) < specs[layer.name].out_channels and layer.name in kept
            else layer
            for layer in self
        )
        return replace(self, layers=layers, fingerprint=fingerprint(specs.values()))


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
