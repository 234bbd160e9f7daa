"""Read the options of each group, their types, defaults and explanations, from the code that takes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from decomposition import get_format, list_formats
from decomposition.choose.heuristics import get_heuristic, list_heuristics
from optim import list_optimizers, optimizer_record
from pruning import get_pruner, list_pruners
from rankrl.cli.config.choices import Group
from rankrl.data import dataset_option_types, dataset_source, list_datasets, load_dataset
from rankrl.models import list_models, model_option_types, model_source
from rankrl.option_types import OptionTypes, parameter_defaults, parameter_types
from rankrl.options.names import NO_OPTIONS, NONE, ModelOptions
from rankrl.plan_search.scores.rewards import list_rewards, reward_option_types, reward_source
from rankrl.plan_search.selectors import (
    list_selectors,
    selector_class,
    selector_option_types,
    selector_options,
)
from rankrl.pruners.options import options_class, pruner_defaults, pruner_option_types
from rankrl.runs.tracking import list_trackers, tracker_class, tracker_option_types

_SECTIONS = ("Args:", "Attributes:")
_ENTRY = re.compile(r"(\*{0,2}\w+): (.*)")
_INDENT = "    "


def explanations(*owners: object) -> dict[str, str]:
    """Return each name's entry in the sections Args and Attributes, as one line of text."""
    texts: dict[str, str] = {}
    for owner in owners:
        for documentation in _documentation(owner):
            texts = {**dict(_entries(documentation)), **texts}
    return texts


def summary(owner: object) -> str:
    """Return the first paragraph of a docstring, as one line of text; empty without one."""
    text = next(_documentation(owner), "")
    return " ".join(text.split("\n\n")[0].split())


def _documentation(owner: object) -> Iterator[str]:
    """Yield the docstrings of a function, or of a class and its bases."""
    for each in inspect.getmro(owner) if isinstance(owner, type) else (owner,):
        if each is not object and each.__doc__:
            yield inspect.cleandoc(each.__doc__)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    inside, name, words = False, "", [""]
    for line in [*text.splitlines(), "end"]:
        entry = _ENTRY.fullmatch(line.removeprefix(_INDENT)) if inside else None
        if entry is not None or (line and not line.startswith(_INDENT)):
            if name:
                yield name, " ".join(words)
            name, words = (entry[1], [entry[2]]) if entry is not None else ("", [""])
            inside = entry is not None or line in _SECTIONS
        elif line.strip():
            words.append(line.strip())


def _nothing(name: str) -> dict[str, Any]:
    del name
    return {}


def _model_types(name: str) -> tuple[OptionTypes, bool]:
    types, takes_others = model_option_types(name)
    return {**parameter_types(ModelOptions), **types}, takes_others


def _model_defaults(name: str) -> dict[str, Any]:
    build = model_source(name).build
    shape_and_classes = list(inspect.signature(build).parameters)[:2]
    return {**parameter_defaults(ModelOptions), **parameter_defaults(build, without=shape_and_classes)}


def _model_owners(name: str) -> tuple[object, ...]:
    build = model_source(name).build
    return build, inspect.signature(build, eval_str=True).return_annotation, ModelOptions


def _dataset_defaults(name: str) -> dict[str, Any]:
    own = parameter_defaults(dataset_source(name).read, without=("root",))
    return {**own, **parameter_defaults(load_dataset, without=("name", "seed", "root"))}


def _selector_about(name: str) -> str:
    selector = selector_class(name)
    if name in list_heuristics():
        return _sentences(selector.description, summary(get_heuristic(name).choose), "One plan")
    return _sentences(summary(selector) or selector.description)


def _tracking_defaults(name: str) -> dict[str, Any]:
    return {} if name == NONE else parameter_defaults(tracker_class(name), without=("folder",))


def _tracking_about(name: str) -> str:
    if name == NONE:
        return "No tracking; episodes.csv and metrics.json are written all the same."
    return summary(tracker_class(name))


def _closed(types: Callable[[str], OptionTypes]) -> Callable[[str], tuple[OptionTypes, bool]]:
    return lambda name: (types(name), False)


def _sentences(*texts: str) -> str:
    return " ".join(f"{text[:1].upper()}{text[1:].rstrip('.')}." for text in texts if text)


def _optimizer(name: str) -> Callable[..., Any]:
    return optimizer_record(name).factory


GROUPS = {
    "model": Group(
        "model",
        list_models,
        lambda name: _sentences(model_source(name).description),
        _model_owners,
        _model_types,
        _model_defaults,
        key="architecture",
    ),
    "dataset": Group(
        "dataset",
        list_datasets,
        lambda name: _sentences(dataset_source(name).description),
        lambda name: (dataset_source(name).read, load_dataset),
        _closed(dataset_option_types),
        _dataset_defaults,
    ),
    "decomposition": Group(
        "format",
        list_formats,
        lambda name: _sentences(get_format(name).description, summary(type(get_format(name)))),
        lambda name: (),
        _closed(_nothing),
        _nothing,
        key="format",
    ),
    "selector": Group(
        "selector",
        list_selectors,
        _selector_about,
        lambda name: (selector_class(name), selector_class(name).option_owner()),
        _closed(selector_option_types),
        selector_options,
    ),
    "reward": Group(
        "reward",
        list_rewards,
        lambda name: _sentences(reward_source(name).description, summary(reward_source(name).make)),
        lambda name: (reward_source(name).make,),
        _closed(reward_option_types),
        lambda name: parameter_defaults(reward_source(name).make),
    ),
    "pruner": Group(
        "pruner",
        lambda: [each.name for each in list_pruners()],
        lambda name: _sentences(get_pruner(name).description, summary(get_pruner(name).definition)),
        lambda name: (options_class(name), get_pruner(name).definition),
        _closed(pruner_option_types),
        pruner_defaults,
    ),
    "optim": Group(
        "optimizer",
        list_optimizers,
        lambda name: _sentences(optimizer_record(name).description),
        lambda name: (_optimizer(name),),
        _closed(lambda name: parameter_types(_optimizer(name), without=NO_OPTIONS)),
        _nothing,  # an optimizer's options are added as they are needed: +optim.options.NAME=VALUE
        nested=True,
    ),
    "tracking": Group(
        "tracker",
        lambda: [*list_trackers(), NONE],
        _tracking_about,
        lambda name: () if name == NONE else (tracker_class(name),),
        _closed(tracker_option_types),
        _tracking_defaults,
        nested=True,
    ),
}
