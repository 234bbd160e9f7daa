"""Write search problems as JSON and read them back: layers, candidates, costs, losses and budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from decomposition.choose.budget import Budget
from decomposition.choose.candidates import Candidate, CandidateSet
from decomposition.network.inputs import InputSpec, shape_to_json
from decomposition.network.layers import LayerSpec, Storage
from decomposition.operations import Cost, operation_from_dict
from rankrl.errors import ConfigError
from rankrl.plan_search.space.problem import SearchProblem

PROBLEM_VERSION = 1
_TUPLES = ("kernel_size", "stride")
_NESTED = ("input_sizes", "output_sizes")


def problem_to_json(problem: SearchProblem) -> dict[str, Any]:
    """Return plain values for JSON, without the rewrites of the network."""
    return {
        "version": PROBLEM_VERSION,
        "input_shape": shape_to_json(problem.input_shape),
        "params": problem.params,
        "macs": problem.macs,
        "budget": None if problem.budget is None else asdict(problem.budget),
        "specs": [asdict(spec) for spec in problem.specs],
        "sites": [_site_to_json(site) for site in problem.sites],
    }


def problem_from_json(content: Mapping[str, Any], source: str) -> SearchProblem:
    """Read a problem; `source` names it in the message of a `ConfigError`."""
    if content.get("version") != PROBLEM_VERSION:
        raise ConfigError(
            f"{source} has version {content.get('version')!r}; this rankrl reads {PROBLEM_VERSION}"
        )
    shape = content["input_shape"]
    whole = isinstance(shape, list) and all(type(size) is int for size in shape)
    specs = tuple(map(_spec, content["specs"]))

    return SearchProblem(
        specs,
        tuple(_site(entry, source) for entry in content["sites"]),
        tuple(shape) if whole else InputSpec.from_json(shape),
        content["params"],
        content["macs"],
        _budget(content["budget"]),
    )


def _site_to_json(site: CandidateSet) -> dict[str, Any]:
    return {
        "name": site.name,
        "layers": site.layers,
        "producer": site.producer,
        "importance": site.importance,
        "must_change": site.must_change,
        "spec": asdict(site.spec),
        "candidates": [_candidate_to_json(candidate) for candidate in site.candidates],
    }


def _candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    values = {name: getattr(candidate, name) for name in ("error", "generator")}
    optional = {
        "reason": candidate.reason,
        "reads": candidate.reads,
        "level": candidate.level or None,
        "narrower": [each and _cost_to_json(each) for each in candidate.narrower] or None,
        "passes_int8_through": candidate.passes_int8_through or None,
    }
    return {
        "operations": [operation.to_dict() for operation in candidate.operations],
        "cost": _cost_to_json(candidate.cost),
        **values,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _cost_to_json(cost: Cost) -> list[float | None]:
    return list(asdict(cost).values())


def _site(entry: Mapping[str, Any], source: str) -> CandidateSet:
    where = f"{source}, layer {entry['name']!r}"
    return CandidateSet(
        _spec(entry["spec"]),
        tuple(_candidate(each, where) for each in entry["candidates"]),
        entry["importance"],
        None if entry["layers"] is None else tuple(entry["layers"]),
        entry["producer"],
        entry.get("must_change", False),  # files of before have none
    )


def _candidate(entry: Mapping[str, Any], where: str) -> Candidate:
    operations = tuple(operation_from_dict(each, where) for each in entry["operations"])
    reads = entry.get("reads")
    return Candidate(
        operations,
        Cost(*entry["cost"]),
        entry["error"],
        entry["generator"],
        entry.get("reason"),
        None if reads is None else tuple(reads),
        entry.get("level", 0),
        tuple(None if each is None else Cost(*each) for each in entry.get("narrower", ())),
        entry.get("passes_int8_through", False),
    )


def _spec(entry: Mapping[str, Any]) -> LayerSpec:
    values = dict(entry)
    values |= {name: tuple(values[name]) for name in _TUPLES}
    values |= {name: tuple(map(tuple, values[name])) for name in _NESTED}
    return LayerSpec(**values | {"storage": Storage(**values["storage"])})


def _budget(entry: Mapping[str, Any] | None) -> Budget | None:
    if entry is None:
        return None
    return Budget(**{**entry, "borders": tuple(entry["borders"]), "also": _budget(entry["also"])})
