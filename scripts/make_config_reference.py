"""Write docs/configuration.md, every option with type, default and explanation.

Types and explanations are those of the dataclass, class or function that takes the option; the defaults are
the composed configuration's.

    python scripts/make_config_reference.py            # writes it
    python scripts/make_config_reference.py --check    # exit code 1 if it is not current
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from decomposition import get_format
from decomposition.choose.heuristics import get_heuristic, list_heuristics
from optim import optimizer_record
from pruning import get_pruner
from rankrl.cli.config.schema import (
    GROUPS,
    AppConfig,
    Choice,
    config_folder,
    group_choices,
    group_names,
    store_groups,
)
from rankrl.data import dataset_source
from rankrl.models import model_source
from rankrl.option_types import described, parameter_defaults
from rankrl.options.names import NO_OPTIONS, NONE, option_fields
from rankrl.plan_search.scores.rewards import reward_source
from rankrl.plan_search.selectors import selector_class
from rankrl.runs.tracking import tracker_class

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# All options

Written by `scripts/make_config_reference.py` from the code; a test checks that it is current.

Set an option with `NAME=VALUE`, choose from a group with `GROUP=CHOICE`. `null` means none, `???` that you
have to set it. A plus adds entries to a mapping: `'+pruner.strengths={conv1: 2.0}'`. Commas separate the
values of a sweep, so quote text with brackets, quotes or commas twice: `"model.checkpoint='a[1].pt'"`.
`--config-dir FOLDER` adds your own choices, `FOLDER/GROUP/NAME.yaml`. `rankrl --cfg job` prints the whole
configuration of a command without running it.
"""
_IN_YAML = {"None": "null", "True": "true", "False": "false"}


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


def owners(group: str, choice: str) -> Iterator[object]:
    """Yield what explains a choice's options, the first one first."""
    if group == "selector":
        yield selector_class(choice)
    taking = list(GROUPS[group].owners(choice))
    yield from reversed(taking)
    if group == "model":
        yield inspect.signature(taking[-1], eval_str=True).return_annotation
    if group == "pruner":
        yield get_pruner(choice).definition


def sentences(*texts: str) -> str:
    return " ".join(f"{text[:1].upper()}{text[1:].rstrip('.')}." for text in texts if text)


def about_choice(group: str, choice: str) -> str:
    if group == "tracking":
        if choice == NONE:
            return "No tracking; episodes.csv and metrics.json are written all the same."
        return summary(tracker_class(choice))
    if group == "selector":
        selector = selector_class(choice)
        if choice in list_heuristics():
            return sentences(selector.description, summary(get_heuristic(choice).choose), "One plan")
        return sentences(summary(selector) or selector.description)
    described: dict[str, tuple[Callable[[str], Any], Callable[[Any], object]]] = {
        "model": (model_source, lambda source: None),
        "dataset": (dataset_source, lambda source: None),
        "optim": (optimizer_record, lambda record: None),
        "decomposition": (get_format, type),
        "reward": (reward_source, lambda source: source.make),
        "pruner": (get_pruner, lambda pruner: pruner.definition),
    }
    find, documented = described[group]
    entry = find(choice)
    owner = documented(entry)
    return sentences(entry.description, "" if owner is None else summary(owner))


@dataclasses.dataclass(frozen=True)
class Option:
    """One row of the page.

    Attributes:
        name: Dotted name.
        kind: Its type in words.
        default: The default as YAML has it.
        explanation: What it is.
    """

    name: str
    kind: str
    default: str
    explanation: str


def section_options(section: type, values: Mapping[str, Any], prefix: str) -> Iterator[Option]:
    """Yield the options of a section of the schema, those of the sections within it too.

    Args:
        section: A dataclass of `rankrl.cli.config.schema`.
        values: The defaults.
        prefix: What the names begin with.
    """
    hints, own = typing.get_type_hints(section), explanations(section)
    for field in option_fields(section):
        hint, explanation = hints[field.name], own.get(field.name, "")
        if dataclasses.is_dataclass(hint):
            yield from section_options(typing.cast(type, hint), values[field.name], f"{prefix}{field.name}.")
            continue
        yield row(f"{prefix}{field.name}", hint, values[field.name], explanation)


def choice_options(group: str, choice: str, values: Mapping[str, Any]) -> Iterator[Option]:
    """Yield the options of a registered choice of a group.

    Args:
        group: A name of `GROUPS`.
        choice: A registered name.
        values: What the configuration holds with that choice.
    """
    described = GROUPS[group]
    types, words = described.types(choice), explanations(*owners(group, choice))
    prefix, added = f"{group}.", {}
    if group == "optim":
        prefix, factory = "+optim.options.", optimizer_record(choice).factory
        added = parameter_defaults(factory, without=NO_OPTIONS)
    options = values["options"] if described.nested else values
    prefix = "tracking.options." if group == "tracking" else prefix
    for name, default in {**added, **{key: options[key] for key in options if key in types}}.items():
        if name not in words:
            sys.exit(
                f"the {described.noun} {choice!r} does not explain its option {name!r}; add it to the "
                "section Args of the docstring of the function or class that takes it"
            )
        yield row(f"{prefix}{name}", types[name], default, words[name])


def row(name: str, hint: Any, default: Any, explanation: str) -> Option:
    text = re.sub(r"\b(None|True|False)\b", lambda word: _IN_YAML[word[1]], explanation)
    text = f"{text[:1].upper()}{text[1:]}"
    value = list(default) if isinstance(default, tuple) else default
    written = (
        yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("\n...\n").strip()
    )
    return Option(name, described(hint), "???" if default == "???" else written, text)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(options: list[Option]) -> str:
    rows = [
        f"| `{each.name}` | {cell(each.kind)} | `{cell(each.default)}` | {cell(each.explanation)} |"
        for each in options
    ]
    return "\n".join(["| option | type | default | |", "|---|---|---|---|", *rows])


def about(section: type) -> str:
    text = inspect.cleandoc(section.__doc__ or "").split("Attributes:")[0]
    return " ".join(text.split())


def comment(path: Path) -> str:
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# @"))
    words = []
    for line in lines:
        if not line.startswith("#"):
            break
        words.append(line.removeprefix("#").strip())
    return " ".join(words)


def written_options(path: Path) -> list[tuple[str, str]]:
    """Return the choices of groups and what else a file sets, dotted; Hydra's own options are left out."""

    def leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", str(yaml.safe_dump(value, default_flow_style=True)).split("\n")[0]

    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    chosen = [each for each in values.get("defaults", ()) if isinstance(each, Mapping)]
    groups = [(key.removeprefix("override /"), str(name)) for each in chosen for key, name in each.items()]
    own = {key: each for key, each in values.items() if key not in ("defaults", "hydra")}
    return [*groups, *leaves(own, "")]


def composed(*overrides: str) -> dict[str, Any]:
    return typing.cast(dict[str, Any], OmegaConf.to_container(compose("config", overrides=list(overrides))))


def registered_choices(groups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what the registered choices of each group set there; one of each group is composed at a time."""
    known = {
        group: [choice for choice in group_choices(group) if choice in GROUPS[group].known()]
        for group in groups
        if group in GROUPS
    }
    entries: dict[str, dict[str, Any]] = {group: {} for group in known}
    for choices in zip_longest(*known.values()):
        together = {group: choice for group, choice in zip(known, choices, strict=True) if choice is not None}
        config = composed(*(f"{group}={choice}" for group, choice in together.items()))
        for group, choice in together.items():
            entries[group][choice] = config[group]
    return entries


def reference() -> str:
    store_groups()
    with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        default = composed()
        parts = [HEAD, "## Options of every run\n"]
        hints = typing.get_type_hints(AppConfig)
        plain = [name for name, hint in hints.items() if not _holds_options(hint)]
        parts += [table([each for each in section_options(AppConfig, default, "") if each.name in plain])]
        groups = [name for name in group_names() if not name.startswith("hydra")]
        registered = registered_choices(groups)
        sections = {
            name: typing.cast(type, hint)
            for name, hint in hints.items()
            if dataclasses.is_dataclass(hint) and name not in groups
        }
        parts += [
            "\n".join(["", *(f"- `{name}.`: {about(section)}" for name, section in sections.items()), ""])
        ]
        parts += [
            table(
                [
                    each
                    for name in sections
                    for each in section_options(sections[name], default[name], f"{name}.")
                ]
            )
        ]
        for group in groups:
            parts += _group(group, hints.get(group), default, registered.get(group, {}))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _holds_options(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or hint == Choice


def _group(group: str, hint: Any, default: Mapping[str, Any], registered: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the page on a group; `registered` holds what its registered choices set."""
    yield f"\n## `{group}=`\n"
    if dataclasses.is_dataclass(hint):  # all choices have these
        section = typing.cast(type, hint)
        yield f"{about(section)}\n"
        yield table(list(section_options(section, default[group], f"{group}.")))
    yield "\n".join(["", *(_choice(group, choice) for choice in _shown(group, registered)), ""])
    owners: dict[Option, list[str]] = {}
    for choice in registered:
        for option in choice_options(group, choice, registered[choice]):
            owners.setdefault(option, []).append(choice)
    rows: dict[tuple[str, str, str], Option] = {}
    for option, choices in sorted(owners.items(), key=lambda each: -len(each[1])):
        own = _of(option, choices if len(choices) < len(registered) else [])
        key = own.name, own.kind, own.default
        before = f"{rows[key].explanation} " if key in rows else ""
        rows[key] = dataclasses.replace(own, explanation=f"{before}{own.explanation}")
    yield f"{table(list(rows.values()))}\n" if rows else ""


def _of(option: Option, choices: Sequence[str]) -> Option:
    """Return an option whose explanation says which choices have it; without choices as it is."""
    names = ", ".join(f"`{each}`" for each in choices)
    return dataclasses.replace(option, explanation=f"{names}: {option.explanation}") if names else option


def _shown(group: str, registered: Mapping[str, Any]) -> Iterator[str]:
    for choice in group_choices(group):
        if choice in registered or (config_folder() / group / f"{choice}.yaml").is_file():
            yield choice


def _choice(group: str, choice: str) -> str:
    """Return a line on a choice of a group: what it is, and what its file sets."""
    path = config_folder() / group / f"{choice}.yaml"
    if not path.is_file():
        return f"- `{group}={choice}`: {about_choice(group, choice)}"
    prefix = "" if "@package _global_" in path.read_text(encoding="utf-8") else f"{group}."
    values = [f"`{prefix}{name}={value}`" for name, value in written_options(path)]
    return f"- `{group}={choice}`: {comment(path)} It sets {', '.join(values)}."


def main() -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the page of all options.")
    parser.add_argument("--check", action="store_true", help="only compare, with exit code 1 if not current")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page (default: docs/configuration.md)")
    arguments = parser.parse_args()
    page, path = reference(), arguments.output
    if not arguments.check:
        path.write_text(page, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == page:
        return 0
    print(f"{path} is not current: run python scripts/make_config_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
