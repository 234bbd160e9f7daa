"""Check the names, values and paths of a command line before Hydra runs it; refuse options without effect."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import typing
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from decomposition.registry import registered
from rankrl.cli.config.compose import (
    COMPOSITION_ERRORS,
    Composed,
    in_words,
    offered_choices,
    parsed_overrides,
    plain_values,
    tried_overrides,
    with_swept,
)
from rankrl.cli.config.schema import (
    GROUPS,
    KITS,
    SEARCHING,
    AppConfig,
    Choice,
    Group,
    built,
    formats,
    group_names,
    heuristics,
)
from rankrl.errors import ConfigError, did_you_mean
from rankrl.files import check_own
from rankrl.option_types import check_known, check_option, check_options, shown
from rankrl.options.decomposition import AUTO
from rankrl.options.names import option_fields
from rankrl.options.timing import RUNTIMES
from rankrl.runs.run_folder import RunFolder, check_free, check_writable

Config = Mapping[str, Any]


def check_command(flags: Namespace, composed: Composed) -> list[dict[str, Any]]:
    """Compose and check a command's configuration; return its values, of a sweep those of several jobs."""
    parsed = parsed_overrides(flags.overrides)
    for name in (each.key_or_group for each in parsed):
        if any(part.startswith("__") for part in name.split(".")):  # OmegaConf would set a Python attribute
            raise ConfigError(f"the option {name!r} is unknown. `rankrl --help` lists all options.")
    try:
        config = composed(next(tried_overrides(parsed)))
        if flags.multirun or config.hydra.mode == RunMode.MULTIRUN:
            parsed = with_swept(config, flags.overrides)
            jobs = list(tried_overrides(parsed))
        else:
            jobs = [flags.overrides]  # of which Hydra refuses those with several values
        checked = [plain_values(composed(each)) for each in jobs]
        for values in checked:
            check_values(values)
            check_effect(values, [each.key_or_group for each in parsed])
        OmegaConf.to_container(config.hydra.overrides.task, resolve=True)  # as the run's record will
    except (*COMPOSITION_ERRORS, RecursionError) as error:
        raise ConfigError(_explained(error, parsed, composed)) from error
    return checked


def check_values(config: Config) -> None:
    """Refuse a composed configuration with a value of the wrong type, out of its range, or not finite."""
    for name, value, hint in _typed(AppConfig, config, ""):
        choice = hint == Choice and isinstance(value, Mapping)  # the owner of its options checks them
        check_option(name, {} if choice else value, hint)
    layers = config["decomposition"]
    if layers["format"] == AUTO:
        check_known("decomposition.formats", "tensor format", layers["formats"] or (), formats())
    else:
        check_known("decomposition.format", "tensor format", [layers["format"]], formats())
    runtimes = sorted({*RUNTIMES, *registered("runtime")})
    check_known("export.runtime", "runtime", [config["export"]["runtime"]], runtimes)
    check_known("export.runtimes", "runtime", config["export"]["runtimes"], runtimes)
    for name in (*sorted(GROUPS.keys() - {"decomposition"}), "train.optim"):
        _check_choice(name, option_value(config, name), GROUPS[name.removeprefix("train.")])
    built(AppConfig, config)


def _check_choice(name: str, section: Config, group: Group) -> None:
    """Refuse a choice that is not registered, and options that it does not take."""
    choice, known = section.get(group.key), group.known()
    if choice is None:
        raise ConfigError(
            f"{name}.{group.key} is missing; choose with {name}=NAME, one of {', '.join(known)}"
        )
    if choice not in known:
        near = did_you_mean(str(choice), known)
        raise ConfigError(f"{name}.{group.key} must be one of {', '.join(known)}, got {shown(choice)}.{near}")
    prefix = f"{name}.options" if group.nested else name
    options = (
        section["options"] if group.nested else {key: section[key] for key in section if key != group.key}
    )
    if options:
        types = group.types(choice)
        others = dict.fromkeys(options, Any) if group.hands_on(choice) else {}
        check_options(f"{group.noun} {choice!r}", prefix, options, {**others, **types})


def _typed(section: type, values: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield every option of the schema with value and type; refuse missing and unknown ones."""
    fields, hints = [each.name for each in option_fields(section)], typing.get_type_hints(section)
    if not isinstance(values, Mapping):
        options = ", ".join(f"{prefix}{name}" for name in fields)
        raise ConfigError(f"{prefix[:-1]} holds options of its own, got {shown(values)}; set {options}")
    for key in (*fields, *values):
        name = f"{prefix}{key}"
        if key not in values:
            raise ConfigError(f"{name} is missing; leave out ~{name}, or set it to a value")
        if key not in fields:
            raise ConfigError(f"the option {name!r} is unknown.{did_you_mean(key, fields)}")
    for key in fields:
        if dataclasses.is_dataclass(hints[key]):
            yield from _typed(typing.cast(type, hints[key]), values[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", values[key], hints[key]


def _explained(error: BaseException, overrides: Sequence[Override], composed: Composed) -> str:
    """Rewrite Hydra's or OmegaConf's message so that it names the nearest option."""
    text = str(error)
    missing = re.search(r"Missing mandatory value: .*?full_key: (\S+)", text, re.DOTALL)
    if missing is not None:
        group = missing[1].partition(".")[0]
        return f"{group}={_chosen(group, overrides, composed)} needs {missing[1]}=VALUE."
    for each in overrides:
        value = "" if each.is_sweep_override() or each.is_delete() else each.value()
        is_group = each.key_or_group in (*group_names(), "hydra/launcher", "hydra/sweeper")
        if is_group and not all(isinstance(name, str | dict) for name in listed(value)):
            return (
                f"{each.input_line}: {each.key_or_group} is the name of a choice. `rankrl --help` lists them."
            )
    twice = re.search(r"Multiple values for (\S+)\.|(\S+) appears more than once", text)
    if twice is not None:
        group = twice[1] or twice[2]
        return f"{group} is chosen twice; choose it once, without a plus: {group}=NAME"
    choice = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if choice is not None:
        group, value = choice.groups()
        known = offered_choices(group)
        own = " One of your own needs plugins=[MODULE]." if group in GROUPS else ""
        near = did_you_mean(value, known) or own
        return f"{group}={value} is unknown; choose from {', '.join(known)}.{near}"
    unknown = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in", text)
    if unknown is not None:
        name = unknown[1] or unknown[2]
        name = next((each.key_or_group for each in overrides if each.key_or_group.endswith(name)), name)
        if not name.startswith("hydra"):  # for its own options Hydra's message is clear
            return _unknown_option(name, overrides, composed)
    return f"{in_words(error)}. `rankrl --cfg job` shows the options and their values."


def _with_choices(overrides: Sequence[Override], composed: Composed) -> DictConfig:
    """Compose with those overrides alone that choose a group, or with none where these are wrong."""
    groups = group_names()
    try:
        return composed(next(tried_overrides([each for each in overrides if each.key_or_group in groups])))
    except COMPOSITION_ERRORS:
        return composed([])


def _chosen(group: str, overrides: Sequence[Override], composed: Composed) -> str:
    section = _with_choices(overrides, composed).get(group)
    return str(section.get(GROUPS[group].key)) if group in GROUPS and section is not None else ""


def _unknown_option(name: str, overrides: Sequence[Override], composed: Composed) -> str:
    """Name the nearest option: of the group and its other choices, else of all."""
    config = _with_choices(overrides, composed)
    known = list(_dotted({key: config._get_node(key) for key in config if key != "hydra"}))
    for mapping in (name, name.rpartition(".")[0]):
        if mapping in known and not any(each.startswith(f"{mapping}.") for each in known):
            return f"{mapping} gets new entries with a plus in front: '+{mapping}={{NAME: VALUE}}'"
    group = name.partition(".")[0]
    owner, choice = GROUPS.get(group), _chosen(group, overrides, composed)
    near, whose = _nearest(name, known), ""
    if not near and owner is not None:
        if choice in owner.known() and owner.hands_on(choice):
            return f"options that {group}={choice} passes on begin with a plus: did you mean '+{name}'?"
        others = {key: each for each in owner.known() for key in _dotted(owner.node(each), f"{group}.")}
        near = _nearest(name, others)
        whose = f" ({group}={others[near]})" if near else ""
    meant = f" Did you mean {near!r}{whose}?" if near else did_you_mean(name, [*known, *group_names()])
    return f"the option {name!r} is unknown.{meant} `rankrl --help` lists all options."


def _nearest(name: str, options: Collection[str]) -> str:
    """Return the nearest option of the same group, or an empty text."""
    group, _, option = name.partition(".")
    within = {each.partition(".")[2]: each for each in options if each.startswith(f"{group}.")}
    near = difflib.get_close_matches(option, within, n=1)
    return within[near[0]] if near else ""


def _dotted(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of all options; `???` and nulls are none's."""
    for key in config:
        yield f"{prefix}{key}"
        value = config._get_node(key) if isinstance(config, DictConfig) else config[key]
        if isinstance(value, dict) or (isinstance(value, DictConfig) and not value._is_none()):
            yield from _dotted(value, f"{prefix}{key}.")


FILES = {
    "weights": "model.safetensors",
    "plan": "plan.json",
    "timing.table": "times.json",
    "model.checkpoint": "dense.safetensors",
    "finetune.teacher": "dense.safetensors",
}
"""Options that name a file, and what a run's folder has for them."""


def named_paths(config: Config, option: str) -> list[str]:
    return listed(option_value(config, option) or [])


def listed(value: Any) -> list[Any]:
    """Return a list as it is, anything else as the only entry of one."""
    return value if isinstance(value, list) else [value]


def check_files(config: Config) -> None:
    """Refuse files that are missing or are folders."""
    for option, name in FILES.items():
        for path in named_paths(config, option):
            if os.path.isdir(path):
                raise ConfigError(f"{option}={path} is a folder; give {option}={Path(path, name)}, a file")
            if not os.path.exists(path):
                raise ConfigError(f"{option} cannot be read: there is no file {path}; check the path")


def check_folder(config: DictConfig, *, multirun: bool) -> Path | None:
    """Refuse a folder that Hydra could not create or write, none is left behind; return that of a sweep."""
    before, own = HydraConfig.instance().cfg, OmegaConf.masked_copy(config, list(config))
    with read_write(own.hydra), open_dict(own.hydra):
        own.hydra.job.num, own.hydra.job.id = 0, "0"
    try:
        HydraConfig.instance().set_config(own)  # resolves `${hydra:...}`
        several = multirun or config.hydra.mode == RunMode.MULTIRUN
        option = "hydra.sweep.dir" if several else "hydra.run.dir"
        name = OmegaConf.select(own, option)
        if name in (None, ""):
            raise ConfigError(f"{option} is empty; name a folder")
    except COMPOSITION_ERRORS as error:
        raise ConfigError(f"the name of the run folder cannot be read: {in_words(error)}") from error
    finally:
        HydraConfig.instance().cfg = before
    folder = Path(str(name))
    check_writable(folder, option)
    if several:
        if config.reuse is not None and not Path(config.reuse).is_dir():
            raise ConfigError(
                f"reuse={config.reuse}: there is no such folder; give one that holds finished runs"
            )
        return folder
    if config.reuse is not None:
        raise ConfigError(f"reuse={config.reuse} is for the jobs of a sweep; leave it out, or add -m")
    check_free(folder)
    if config.resume is None and not config.overwrite:
        refuse_used_folder(RunFolder(folder), plain_values(config))
    return None


def refuse_used_folder(folder: RunFolder, config: Config) -> None:
    """Refuse a folder with files of others, or with a run, and say how its options differ from these."""
    if folder.holds_results:
        state = folder.difference(config) or "already"
        raise ConfigError(
            f"{folder.path} holds a run {state}; `rankrl resume={folder.path}` goes on with it; for a new "
            "run choose another folder with hydra.run.dir=FOLDER, or overwrite=true to remove that one"
        )
    check_own(folder.path)


@dataclass(frozen=True)
class Idle:
    """Options or sections without effect under a condition, and the reason with what to do."""

    options: tuple[str, ...]
    when: Callable[[Config], bool]
    reason: str


def check_effect(config: Config, names: Sequence[str]) -> None:
    """Refuse options in `names` that have no effect in this configuration; null and false ask for nothing."""
    for name in names:
        value = option_value(config, name)
        if value in (None, False):
            continue
        if isinstance(value, Mapping):  # a group's choice
            value = next((value[key] for key in ("name", "format", "architecture") if key in value), value)
        for idle in IDLE:
            concerned = any(name == option or name.startswith(f"{option}.") for option in idle.options)
            if concerned and idle.when(config):
                text = value if isinstance(value, str) else shown(value)
                reason = idle.reason.format(**{**config, "selector": config["selector"]["name"]})
                raise ConfigError(f"{name}={text} has no effect: {reason}")


def option_value(config: Config, name: str) -> Any:
    """Return the value of an option by its dotted name; None where there is none."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _in_file(config: Config) -> bool:
    return config["model"].get("architecture") == "onnx"


def _read_by(option: str, *tasks: str, of_file: Sequence[str] = ()) -> Idle:
    """Return the rule for what these tasks read, with a network in a file `of_file`, too."""
    *others, last = tasks
    choice = f"{', '.join(others)} or {last}" if others else last
    return Idle(
        (option,),
        lambda config: config["task"] not in (*tasks, *(of_file if _in_file(config) else ())),
        f"task={{task}} does not read it; leave it out, or choose task={choice}",
    )


def _needs(options: Sequence[str], needed: str, *instead: str) -> Idle:
    """Return the rule for options without effect while another one, or one of `instead`, is not set."""
    return Idle(
        tuple(options),
        lambda config: all(option_value(config, each) in (None, []) for each in (needed, *instead)),
        f"it goes with {needed}; set that, too",
    )


def _prunes_alone(config: Config) -> bool:
    return config["task"] == "prune" and not any(config["prune"][each] for each in _DECOMPOSING)


def _cannot_split(config: Config) -> bool:
    options = config["decomposition"]
    names = set(options["formats"] or [options["format"]]) & set(formats())
    from decomposition import get_format  # late, as it imports torch

    return any(not get_format(name).tensorisable for name in names)


def _never_refits(config: Config) -> bool:
    layers, statistics = config["decomposition"], config["search"]["statistics"]
    narrows = bool(layers["channels"] or layers["blocks"])
    return narrows if statistics is None else bool(statistics != "refitted")


def _ruled(config: Config) -> bool:
    """Tell whether a rule chooses the plan, without the search that a bounded loss takes."""
    ruled = config["selector"]["name"] in heuristics() and config["budget"]["drop"] is None
    return ruled and config["task"] in ("pipeline", "search", "prune")


_RULE = "selector={selector} is a rule, which scores no plans; choose one that does, such as selector=bayes"
_DECOMPOSING = ("decompose_params", "decompose_macs")
_OF_NETWORKS = (
    *("seed", "model", "dataset", "decomposition", "budget", "reward", "calibration", "finetune", "optim"),
    *("train", "export", "compare.apply", "search.images", "search.augmented"),
    *("search.refit_images", "search.metric", "search.statistics", "search.finalists", "search.workers"),
)
_OF_MODULES = (
    *("calibration", "finetune", "optim", "train", "decomposition.sequential", "export.opset"),
    *("export.preprocess", "export.int8", "export.training", "export.pad_channels", "export.skip"),
    *("export.input_names", "export.output_names", "search.images", "search.augmented"),
    *("search.statistics", "search.workers"),
)
IDLE = (
    *(
        _read_by(each.name, *each.metadata["read_by"])
        for each in dataclasses.fields(AppConfig)
        if each.metadata
    ),
    _read_by("export", "export", *KITS, *SEARCHING, of_file=["apply"]),
    _read_by("export.runtimes", "pipeline", "prune", "export", of_file=["apply", *KITS, *SEARCHING]),
    _read_by("export.skip", "pipeline", "prune"),
    _needs(["finetune.teacher_model", "finetune.teacher_options"], "finetune.teacher"),
    _needs(["timing.table"], "budget.latency", "budget.drop"),
    _needs(["search.cluster", "search.worker_cpus", "search.worker_gpus"], "search.workers"),
    Idle(
        ("search", "selector", "reward", "decomposition", "prune.finetune_epochs"),
        _prunes_alone,
        "task=prune decomposes nothing; set prune.decompose_params or prune.decompose_macs, too",
    ),
    Idle(
        _OF_NETWORKS,
        lambda config: bool(config["bench"]),
        "bench={bench} searches tables, whose networks, budgets and scores are fixed (seeds are "
        "compare.seeds); leave one of the two out",
    ),
    Idle(
        ("finetune", "optim"),
        lambda config: config["task"] == "compare" and not config["compare"]["apply"],
        "compare.apply=false applies no plan; leave one of the two out",
    ),
    Idle(
        ("budget.bytes", "budget.latency", "budget.memory"),
        lambda config: config["task"] == "prune",
        "task=prune removes channels to a fraction of what is counted; set budget.params or budget.macs",
    ),
    Idle(
        ("calibration",),
        lambda config: config["task"] == "inspect" and not config["inspect"]["errors"],
        "layers are listed without being fitted; set inspect.errors=true, too",
    ),
    Idle(
        ("finetune.teacher",),
        lambda config: not config["finetune"]["distillation"],
        "finetune.distillation=0 learns from labels alone; leave one of the two out",
    ),
    Idle(
        ("train",),
        lambda config: config["task"] != "train" and bool(config["model"].get("checkpoint")),
        "model.checkpoint is set, so no dense network is trained; leave one of the two out",
    ),
    Idle(
        ("decomposition.formats",),
        lambda config: config["decomposition"]["format"] in formats(),
        "every layer takes the one format of decomposition.format; choose decomposition=auto",
    ),
    Idle(
        ("decomposition.tensorised",),
        _cannot_split,
        "a format cannot split channel counts; choose decomposition=tensor_ring or tensor_train",
    ),
    Idle(
        ("search.refit_images",),
        _never_refits,
        "plans are refitted with other statistics alone; set search.statistics=refitted",
    ),
    Idle(
        _OF_MODULES,
        _in_file,
        "model=onnx compresses a file as it is, without training or labels; docs/onnx.md lists what it takes",
    ),
    Idle(
        ("search", "reward"),
        lambda config: _in_file(config) and config["selector"]["name"] in heuristics(),
        _RULE,
    ),
    Idle(
        tuple(f"search.{each}" for each in ("episodes", "plans", "seconds", "patience", "finalists")),
        _ruled,
        _RULE,
    ),
    Idle(
        ("dataset.heldout", "dataset.train_images", "dataset.padding", "dataset.flip"),
        lambda config: config["dataset"]["name"] == "inputs",
        "it means nothing for dataset=inputs; leave it out",
    ),
)
