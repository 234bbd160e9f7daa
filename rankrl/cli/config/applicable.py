"""Refuse options that are set on the command line and have no effect.

One table lists when an option has no effect. Defaults pass: only an option that is set is meant to matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankrl.cli.config.choices import formats, heuristics
from rankrl.errors import ConfigError
from rankrl.option_types import shown

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A condition under which options have no effect, and the reason."""

    option: str
    idle: Callable[[Config], bool]
    reason: str
    advice: str

    def concerns(self, name: str) -> bool:
        """Tell whether the rule applies to an option, or to a group's choice."""
        if self.option.endswith("."):
            return name.startswith(self.option) or name == self.option.removesuffix(".")
        return name == self.option


def check_applicable(config: Config, names: Sequence[str]) -> None:
    """Refuse options in `names` that have no effect in this configuration."""
    for name in names:
        value = _value(config, name)
        for rule in RULES:
            if value not in (None, False) and rule.concerns(name) and rule.idle(config):
                reason = rule.reason.format(task=config["task"], selector=config["selector"]["name"])
                held = value
                if isinstance(value, Mapping):  # a group's choice
                    held = value.get("name", value.get("format", value))
                text = held if isinstance(held, str) else shown(held)
                raise ConfigError(f"{name}={text} has no effect: {reason}; {rule.advice}")


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _other_task(*tasks: str) -> Callable[[Config], bool]:
    return lambda config: config["task"] not in tasks


def _one_format(config: Config) -> bool:
    return config["decomposition"]["format"] in formats()


def _cannot_split(config: Config) -> bool:
    options = config["decomposition"]
    names = set(options["formats"] or [options["format"]]) & set(formats())
    from decomposition import get_format  # late, as it imports torch

    return any(not get_format(name).tensorisable for name in names)


def _prunes_alone(config: Config) -> bool:
    return config["task"] == "prune" and not any(
        config["prune"][f"decompose_{measure}"] for measure in ("params", "macs")
    )


_SEARCHING = ("pipeline", "search", "compare", "prune")
_FINETUNING = ("pipeline", "compare", "prune", "finetune", "export")  # export.training writes its optimizer
_KITS = ("timing_kit", "verify_kit")
_TRAINING = ("train", "apply", *_KITS, *_SEARCHING)
_FITTING = ("inspect", "apply", "pretrain", "timing_kit", *_SEARCHING)


def _section(name: str, reason: str, *tasks: str) -> Rule:
    """Return the rule for a section that only these tasks read."""
    *others, last = tasks
    choice = f"{', '.join(others)} or {last}" if others else last
    return Rule(
        f"{name}.",
        _other_task(*tasks),
        f"task={{task}} {reason}",
        f"leave it out, or choose task={choice}",
    )


def _never_refits(config: Config) -> bool:
    layers, statistics = config["decomposition"], config["search"]["statistics"]
    narrows = bool(layers["channels"] or layers["blocks"])
    return narrows if statistics is None else bool(statistics != "refitted")


def _is_onnx(config: Config) -> bool:
    return config["model"].get("architecture") == "onnx"


_UNUSED_BY_ONNX = (
    *("calibration", "finetune", "optim", "train"),
    *("decomposition.sequential", "export.opset", "export.preprocess"),
    *("export.int8", "export.training", "export.pad_channels"),
    *("export.skip", "export.input_names", "export.output_names"),
    *("search.images", "search.augmented", "search.statistics", "search.workers"),
)


def _is_rule(config: Config) -> bool:
    return _is_onnx(config) and config["selector"]["name"] in heuristics()


def _unused_by_onnx(option: str) -> Rule:
    """Return the rule for an option of the training, scoring or export of PyTorch networks."""
    return Rule(
        f"{option}." if "." not in option else option,
        _is_onnx,
        "model=onnx compresses a file as it is, without training or labels",
        "leave it out; docs/onnx.md lists what it takes",
    )


RULES = (
    _section("search", "searches for no plan", "pretrain", *_SEARCHING),
    _section("selector", "searches for no plan", *_SEARCHING),
    _section("reward", "searches for no plan", *_SEARCHING),
    _section("calibration", "fits no layers", *_FITTING),
    _section("decomposition", "fits no layers", *_FITTING),
    *(
        Rule(
            f"{section}.",
            _prunes_alone,
            "task=prune decomposes nothing, for which a plan would be searched",
            "leave it out, or set prune.decompose_params or prune.decompose_macs",
        )
        for section in ("search", "selector", "reward", "decomposition")
    ),
    _section("finetune", "fine-tunes nothing", *_FINETUNING),
    *(
        Rule(
            f"finetune.{name}",
            lambda config: not config["finetune"]["teacher"],
            "the dense network teaches",
            "set finetune.teacher=CHECKPOINT too",
        )
        for name in ("teacher_model", "teacher_options.")
    ),
    Rule(
        "finetune.teacher",
        lambda config: not config["finetune"]["distillation"],
        "finetune.distillation=0 learns from labels alone",
        "leave one of the two out",
    ),
    _section("optim", "fine-tunes nothing", *_FINETUNING),
    _section("train", "trains no dense network", *_TRAINING),
    Rule(
        "export.",
        lambda config: (
            config["task"] not in ("export", *_KITS, *_SEARCHING)
            and not (_is_onnx(config) and config["task"] == "apply")
        ),
        "task={task} neither exports a network nor times one",
        f"leave it out, or choose task=export, {', '.join(_SEARCHING[:-1])} or {_SEARCHING[-1]}",
    ),
    Rule(
        "export.runtimes",
        lambda config: not _is_onnx(config) and _other_task("pipeline", "prune", "export")(config),
        "task={task} writes no ONNX file",
        "leave it out, or choose task=pipeline, prune or export",
    ),
    Rule(
        "export.skip",
        _other_task("pipeline", "prune"),
        "task={task} has no ONNX file that could be left out",
        "leave it out, or choose task=pipeline or prune",
    ),
    Rule(
        "train.",
        lambda config: config["task"] != "train" and bool(config["model"].get("checkpoint")),
        "model.checkpoint is set, so no dense network is trained",
        "leave one of the two out",
    ),
    _section("budget", "chooses no plan, which a budget would limit", *_SEARCHING),
    *(
        Rule(
            f"budget.{name}",
            lambda config: config["task"] == "prune",
            "task=prune removes channels to a fraction of the parameters or MACs",
            "set budget.params or budget.macs, or choose task=pipeline",
        )
        for name in ("bytes", "latency")
    ),
    Rule(
        "timing.table",
        lambda config: config["budget"]["latency"] is None and config["budget"]["drop"] is None,
        "there is no budget in time",
        "set budget.latency too",
    ),
    _section("pruner", "prunes nothing", "prune"),
    _section("prune", "prunes nothing", "prune"),
    Rule(
        "prune.finetune_epochs",
        _prunes_alone,
        "task=prune decomposes nothing, before which it could fine-tune",
        "set finetune.epochs, or prune.decompose_params or prune.decompose_macs",
    ),
    Rule(
        "compare.",
        _other_task("compare"),
        "task={task} searches with one selector and one seed",
        "set selector and seed, or choose task=compare",
    ),
    Rule(
        "pretrain.",
        _other_task("pretrain"),
        "task={task} trains no policy",
        "leave it out, or choose task=pretrain",
    ),
    Rule(
        "inspect.",
        _other_task("inspect"),
        "task={task} lists no layers",
        "leave it out, or choose task=inspect",
    ),
    Rule(
        "calibration.",
        lambda config: config["task"] == "inspect" and not config["inspect"]["errors"],
        "layers are listed without being fitted",
        "leave it out, or set inspect.errors=true",
    ),
    Rule(
        "plan",
        _other_task("apply"),
        "task={task} applies no plan of another run",
        "leave it out, or choose task=apply",
    ),
    Rule(
        "weights",
        _other_task("finetune", "evaluate", "export"),
        "task={task} does not begin with a compressed network",
        "give the dense network as model.checkpoint=PATH, or choose task=finetune, evaluate or export",
    ),
    Rule(
        "run",
        _other_task("finetune", "evaluate", "export", "apply"),
        "task={task} takes nothing from an earlier run",
        "leave it out, or choose task=finetune, evaluate, export or apply",
    ),
    Rule(
        "runs",
        _other_task("report", "verify_kit"),
        "task={task} gathers no runs",
        "leave it out, or choose task=report or verify_kit",
    ),
    Rule(
        "decomposition.formats",
        _one_format,
        "every layer takes the one format of decomposition.format",
        "choose decomposition=auto with it",
    ),
    Rule(
        "decomposition.tensorised",
        _cannot_split,
        "one of the formats cannot split channel counts",
        "leave it out, or choose decomposition=tensor_ring or decomposition=tensor_train",
    ),
    Rule(
        "search.refit_images",
        _never_refits,
        "plans are refitted with search.statistics=refitted alone",
        "leave it out, or set search.statistics=refitted",
    ),
    *(
        Rule(
            f"search.{name}",
            lambda config: config["search"]["workers"] is None,
            "no worker processes are asked for",
            "set search.workers too",
        )
        for name in ("cluster", "worker_cpus", "worker_gpus")
    ),
    *map(_unused_by_onnx, _UNUSED_BY_ONNX),
    *(
        Rule(
            f"{section}.",
            _is_rule,
            "selector={selector} is a rule, which scores no plans",
            "leave it out, or choose a selector that does, such as selector=bayes",
        )
        for section in ("search", "reward")
    ),
    *(
        Rule(
            f"dataset.{name}",
            lambda config: config["dataset"]["name"] == "inputs",
            f"dataset.{name} means nothing for dataset=inputs",
            "leave it out",
        )
        for name in ("heldout", "train_images", "padding", "flip")
    ),
)
