"""An option has one default, and every option that a message names exists."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

import rankrl
from decomposition import FitOptions, apply_plan
from decomposition.operations.operation import FINAL
from decomposition.operations.quantise import PRECISIONS
from rankrl.cli.config.choices import config_folder
from rankrl.cli.config.schema import AppConfig
from rankrl.data import load_dataset
from rankrl.networks.network import CandidateOptions
from rankrl.options import decomposition
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.options.tasks import EpisodeOptions, PretrainingOptions
from rankrl.options.timing import ExportOptions, LatencyOptions
from rankrl.plan_search.scores.evaluators import EvaluatorOptions
from rankrl.plan_search.selectors import create_selector
from rankrl.pruners.options import PruningOptions
from rankrl.training import TrainingRecipe

# Options that are derived from others, or called otherwise, where the workflow takes them.
DERIVED = {
    "heldout": "of a file, whose inputs are no dataset",
    "search": "the section `search`",
    "decomposition": "decomposition.format in float32, for a module; for a file the formats of plain nodes",
    "multiple": "decomposition.rank_multiple: null stands for a number that depends on the budget",
    "precisions": "decomposition.precisions: null stands for those that lower what the budget counts",
    "reward_options": "reward.*",
    "measure": "which of budget.params and budget.macs is set",
    "kept": "the budget",
    "pruner": "pruner.name",
    "timing": "export.*",
    "evaluator": "search.*",
    "root": "RANKRL_DATA in the environment",
    "label_smoothing": "train.label_smoothing; a teacher's answers are soft",
    "metric": "search.metric: null stands for what suits the scores",
    "statistics": "search.statistics: null stands for what the network and its plans allow",
    "folder": "no option",
    "cache": "no option",
    "decay_vectors": "no option",
    "lr": "optim.lr: null stands for a rate that depends on what was done to the network",
    "optimizer_options": "optim.options",
    "restore_best": "finetune.restore_best: null stands for whether held-out images may choose",
    "distillation": "finetune.distillation is for fine-tuning, which has a teacher; a recipe has none",
    "mask": "pruner.*",
    "training": "pruner.*",
    "steps": "pruner.*",
    "scope": "pruner.scope, of criteria alone",
}
# Which options a class or function of the code stands for: prefixes, first hit counts.
OWNERS: list[tuple[Any, tuple[str, ...]]] = [
    (CandidateOptions, ("decomposition.",)),
    (EvaluatorOptions, ("search.", "")),
    (SearchOptions, ("search.",)),
    (BudgetOptions, ("budget.",)),
    (ExportOptions, ("export.",)),
    (LatencyOptions, ("export.",)),
    (TrainingRecipe, ("finetune.", "")),
    (EpisodeOptions, ("pretrain.",)),
    (PretrainingOptions, ("pretrain.",)),
    (PruningOptions, ("pruner.", "decomposition.", "")),
    (create_selector, ("search.", "")),
    (rankrl.search, ("search.", "decomposition.", "budget.", "")),
    (load_dataset, ("dataset.", "")),
]
RENAMED = {("search", "selector"): "selector.name"}
RENAMED |= {("TrainingRecipe", "optimizer"): "optim.name"}
RENAMED |= {("search", "reward"): "reward.name", ("SearchGoal", "reward"): "reward.name"}
OTHERS = {(rankrl.search, "images")}  # how image files become inputs; `search.images` counts images


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = OmegaConf.to_container(hydra.compose("config"))
    return dict(leaves(config, ""))


def leaves(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner[0].__name__)
def test_the_code_has_the_defaults_of_the_configuration(owner: Any, defaults: dict[str, Any]) -> None:
    function, prefixes = owner
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty or name in DERIVED or (function, name) in OTHERS:
            continue
        if name in getattr(function, "PYTHON_ONLY", ()):
            continue
        names = [RENAMED.get((function.__name__, name), ""), *(prefix + name for prefix in prefixes)]
        option = next((each for each in names if each in defaults), None)
        if option is None and parameter.default is None:  # leaves an option out
            continue
        if isinstance(parameter.default, type(dataclasses.MISSING)) or "factory" in repr(parameter.default):
            continue
        assert option is not None, (
            f"{function.__name__}.{name} is no option; name it in DERIVED with the reason"
        )
        assert plain(parameter.default) == defaults[option], f"{function.__name__}.{name} and {option}"


def test_light_modules_repeat_what_the_libraries_know() -> None:
    """Options are read without torch, which the libraries that take them import."""
    own = DecompositionOptions()
    assert own.iterations == FitOptions.iterations
    assert (own.final_iterations, own.final_starts) == (FINAL.iterations, FINAL.starts)
    assert tuple(PRECISIONS) == decomposition.PRECISIONS
    taken = inspect.signature(apply_plan).parameters
    assert own.sequential == taken["sequential"].default


@pytest.fixture(scope="module")
def option_names(with_each_choice: dict[str, Any]) -> set[str]:
    """Every option with one choice of a group or another, and the groups."""
    return {name for config in with_each_choice.values() for name, _ in leaves(config, "")}


# What looks like an option and is none: placeholders, functions, files, and a name that a message refuses.
NO_OPTIONS = {
    "model.state_dict": "torch's",
    "model.NAME": "any argument of the user's own function",
    "model.num_classes": "the user's own function's",
    "model.weights": "refused: nothing is downloaded",
    "decomposition.inspect_layers": "a function",
    "task.description": "the progress bar's",
    "task.fields": "the progress bar's",
}
FILES = ("json", "lock", "safetensors", "csv", "md", "png", "onnx", "html")
SECTIONS = "|".join(field.name for field in dataclasses.fields(AppConfig))
NAMED = re.compile(rf"(?<![\w./])({SECTIONS})((?:\.[A-Za-z_]\w*)+)(?![\w:]|\.\w)")  # no MODULE:NAME


def messages() -> Iterator[tuple[Path, int, str]]:
    """All strings of the package but docstrings; what stands for a value in an f-string is a blank."""
    for path in sorted(Path(rankrl.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        inside = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield path, node.lineno, "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                known = id(node) in documentation or id(node) in inside
                yield path, node.lineno, "" if known else node.value


def test_every_option_that_a_message_names_exists(option_names: set[str]) -> None:
    known, found, unknown = option_names, set(), []
    for path, line, text in messages():
        for match in NAMED.finditer(text):
            name = match.group().removesuffix(".")
            if name.rpartition(".")[2] in FILES or text[match.end() : match.end() + 2] in (".{", "{}"):
                continue
            found.add(name)
            if name not in known and name not in NO_OPTIONS:
                unknown.append(f"{path.name}:{line}: {name}")
    assert not unknown
    assert {"search.metric", "budget.latency", "selector.hidden", "pruner.scope"} <= found
    assert len(found) > 40


def test_auto_has_the_same_formats_on_the_command_line_and_in_python() -> None:
    file = OmegaConf.load(Path(config_folder()) / "decomposition" / "auto.yaml")
    assert tuple(file.formats) == DecompositionOptions(format="auto").choices
