"""What the command line says arrives in the workflow."""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
from command_line import QUICK, read_json, settings, small_network, task_refusal, task_run
from omegaconf import OmegaConf

import rankrl
from decomposition import CompressionPlan, FitOptions, apply_plan
from decomposition.operations import FINAL, PRECISIONS
from rankrl.cli.config.schema import AppConfig, config_folder
from rankrl.data import load_dataset
from rankrl.errors import ConfigError, ExportError
from rankrl.models import build_model
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.runtimes import get_runtime
from rankrl.operations import RemoveBlock, kept_channels, removed_blocks
from rankrl.options import decomposition
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.options.selectors import DEFAULT_SELECTOR
from rankrl.options.timing import ExportOptions, LatencyOptions
from rankrl.plan_search.scores.evaluators import EvaluatorOptions
from rankrl.plan_search.selectors import create_selector
from rankrl.pruners.options import PruningOptions
from rankrl.training import TrainingRecipe
from rankrl.verify import measure


def test_a_budget_in_time_is_measured_as_the_export_is() -> None:
    found = task_run("budget.latency=0.6", "export.batch=8", "export.threads=2").goal
    assert found.budget.latency == 0.6
    assert (found.timing.batch, found.timing.threads) == (8, 2)
    assert found.counted["params"] is None


def test_without_a_budget_accuracy_keeps_a_share_of_the_parameters() -> None:
    assert task_run().goal.counted["params"] == 0.4
    assert task_run("reward=amc").goal.counted["params"] is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ("refitted", "soft_agreement", 1)),
        (("budget.latency=0.5",), ("refitted", "soft_agreement", 1)),
        (("search.metric=accuracy", "search.finalists=3"), ("refitted", "accuracy", 3)),
        (("search.statistics=corrected",), ("corrected", "accuracy", 5)),
        (("decomposition.channels=[0.5]",), ("corrected", "accuracy", 5)),
        (("decomposition.blocks=true", "budget.macs=0.5"), ("corrected", "accuracy", 5)),
    ],
)
def test_scores_see_the_refit_where_they_can_and_finalists_are_refitted_elsewhere(
    overrides: tuple[str, ...], expected: tuple[str, str, int]
) -> None:
    search = task_run(*overrides).request().goal.search
    assert (search.statistics, search.metric, search.finalists) == expected
    assert search.episodes == 50


@pytest.mark.parametrize("of_file", [(), ("model=onnx", "model.path=a.onnx", "dataset.path=b.npz")])
def test_the_command_line_takes_the_selector_that_calls_take(of_file: tuple[str, ...]) -> None:
    taken = inspect.signature(rankrl.compress).parameters["selector"].default
    assert settings(*of_file).selector["name"] == taken == DEFAULT_SELECTOR


@pytest.mark.parametrize("name", ["params", "macs", "bytes", "latency"])
@pytest.mark.parametrize("value", ["0", "1.5", "-0.2"])
def test_budgets_outside_the_range_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"budget\.{name}=.* is outside \(0, 1\]"):
        _ = task_run(f"budget.{name}={value}").goal


def test_a_search_keeps_two_budgets_at_most() -> None:
    found = task_run("budget.bytes=0.3").goal
    assert (found.budget.bytes, found.counted["params"]) == (0.3, None)
    found = task_run("budget.latency=0.5", "budget.bytes=0.3").goal
    assert (found.budget.bytes, found.budget.latency) == (0.3, 0.5)
    with pytest.raises(
        ConfigError, match=r"budget\.params=0\.5, budget\.macs=0\.4 and budget\.bytes=0\.3 are all set"
    ):
        _ = task_run("budget.params=0.5", "budget.macs=0.4", "budget.bytes=0.3").goal


def test_layers_choose_among_the_formats_that_are_listed() -> None:
    assert task_run("decomposition=tucker").request().timed_candidates().formats == ("tucker",)
    assert task_run().request().timed_candidates().formats == ("cp", "tucker", "tensor_ring")
    assert settings().decomposition == rankrl.DecompositionOptions()
    few = task_run("decomposition=auto", "decomposition.formats=[cp,tucker]")
    assert few.request().timed_candidates().formats == ("cp", "tucker")


@pytest.mark.parametrize(
    ("overrides", "multiple", "precisions"),
    [
        ((), 1, ("float32",)),
        (("budget.latency=0.6",), 32, ("float32", "int8")),
        (("budget.latency=0.6", "decomposition.rank_multiple=4"), 4, ("float32", "int8")),
        (("decomposition.rank_multiple=16",), 16, ("float32",)),
        (("budget.bytes=0.2",), 1, ("float32", "int8")),
        (("decomposition.precisions=[int8,int4_weights]",), 1, ("int8", "int4_weights")),
        (("budget.latency=0.6", "export.reduce_range=true"), 32, ("float32", "int7")),
    ],
)
def test_ranks_fill_the_processor_s_lanes_and_precisions_lower_what_the_budget_counts(
    overrides, multiple, precisions, monkeypatch
) -> None:
    monkeypatch.setattr("rankrl.request.suited_multiple", lambda timing: 32)
    monkeypatch.setattr("rankrl.onnx.export.static_quantiser.sums_overflow", lambda: False)
    found = task_run(*overrides).request().timed_candidates()
    assert (found.multiple, found.precisions) == (multiple, precisions)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "precisions=[int9]",
            r"decomposition\.precisions: there is no precision 'int9'; choose from float32",
        ),
        ("precisions=[]", r"decomposition\.precisions is empty; choose from float32"),
        ("rank_multiple=0", r"decomposition\.rank_multiple must be at least 1, got 0"),
    ],
)
def test_precisions_and_multiples_that_are_none_are_refused(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_run(f"decomposition.{option}").request().timed_candidates()


def test_weighed_outputs_can_be_switched_off() -> None:
    assert task_run().request().timed_candidates().weigh_outputs
    assert not task_run("decomposition.weigh_outputs=false").request().timed_candidates().weigh_outputs


@pytest.mark.parametrize(
    ("overrides", "after_removal", "lr"),
    [((), False, 1e-4), ((), True, 1e-3), (("optim.lr=2e-4",), True, 2e-4), (("optim=sgd",), True, 1e-2)],
)
def test_fine_tuning_takes_larger_steps_after_a_removal(overrides, after_removal, lr) -> None:
    assert task_run(*overrides).finetuning_recipe(after_removal=after_removal).lr == lr


@pytest.mark.parametrize(
    ("overrides", "shape", "lr"),
    [
        (("model=resnet20",), (1, 8, 8), 0.1),
        (("model=lenet5",), (1, 28, 28), 0.01),
        (("model=conv4",), (1, 8, 8), 0.05),
        (("model=torchvision", "model.name=resnet18"), (3, 32, 32), 0.1),
        (("model=torchvision", "model.name=squeezenet1_1"), (3, 32, 32), 0.01),
        (("model=custom", "model._target_=rankrl.models.zoo.LeNet5"), (1, 28, 28), 0.01),
        (("model=lenet5", "train.optim.lr=0.3"), (1, 28, 28), 0.3),
        (("model=lenet5", "train.optim.name=onnx_adam"), (1, 28, 28), 1e-3),
    ],
)
def test_training_from_scratch_takes_the_networks_own_rate(overrides, shape, lr) -> None:
    run = task_run(*overrides)
    config = run.config
    given = {key: value for key, value in config.model.items() if key not in ("architecture", "checkpoint")}
    network = build_model(config.model["architecture"], shape, 10, given)
    assert run.training_recipe(network).lr == lr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}),
        (("+train.optim.options.momentum=0.8",), {"momentum": 0.8, "nesterov": True, "weight_decay": 5e-4}),
        (
            ("+train.optim.options.weight_decay=0.0",),
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
        ),
        (("train.optim.name=onnx_adam",), {}),
        (("train.optim.name=onnx_adagrad", "+train.optim.options.epsilon=1e-5"), {"epsilon": 1e-5}),
    ],
)
def test_training_from_scratch_gives_each_optimizer_options_of_its_own(overrides, expected) -> None:
    assert task_run(*overrides).training_recipe().optimizer_options == expected
    task_run("task=train", *overrides).check()


def test_other_optimizers_need_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"the learning rate of sgd is null.*optim\.lr=0\.01"):
        task_run("optim=sgd", "~finetune.rates.sgd").finetuning_recipe()


def test_the_recipe_at_length_differs_from_the_short_one() -> None:
    short, full = (task_run(f"finetune={name}").finetuning_recipe() for name in ("short", "full"))
    assert task_run().finetuning_recipe() == short
    assert (short.product_decay, short.ema_decay) == (0.0, None)
    assert full.product_decay > 0
    assert full.ema_decay is not None
    assert full.epochs > short.epochs
    assert full.lr > short.lr
    assert full.distillation == short.distillation == 0.9


def test_the_recipe_for_what_lost_much_is_the_one_at_length_with_larger_steps() -> None:
    full, retrain = (task_run(f"finetune={name}").finetuning_recipe() for name in ("full", "retrain"))
    assert retrain.lr == 10 * full.lr
    assert replace(retrain, lr=full.lr) == full


@pytest.mark.parametrize(
    ("overrides", "new", "restored"),
    [((), True, True), ((), False, False), (("finetune.restore_best=true",), False, True)],
)
def test_images_that_the_network_was_trained_on_choose_no_epoch(overrides, new, restored) -> None:
    recipe = task_run(*overrides).finetuning_recipe(heldout_is_new=new)
    assert recipe.restore_best is restored


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
    (PruningOptions, ("pruner.", "decomposition.", "")),
    (create_selector, ("search.", "")),
    (rankrl.search, ("search.", "decomposition.", "budget.", "")),
    (load_dataset, ("dataset.", "")),
]
RENAMED = {("TrainingRecipe", "optimizer"): "optim.name"}
RENAMED |= {("search", "reward"): "reward.name", ("SearchGoal", "reward"): "reward.name"}
OTHERS = {(rankrl.search, "images")}  # how image files become inputs; `search.images` counts images
OTHERS |= {(rankrl.search, "selector")}  # what scores plans; `compress` and the configuration take a rule
OTHERS |= {(rankrl.search, "calibration")}  # a number of images, as `calibration.images`


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
    **dict.fromkeys(
        (f"task.{name}" for name in ("reward", "greedy", "apply", "plan", "within_budget", "table.choices")),
        "of what make_task returns",
    ),
    "task.fields": "the progress bar's",
}
FILES = ("json", "lock", "safetensors", "csv", "md", "tex", "png", "onnx", "html")
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


Command = Callable[..., None]


def test_channels_leave_the_network_within_one_search(rankrl: Command, tmp_path: Path) -> None:
    rankrl(
        *QUICK,
        *small_network(tmp_path),
        *(
            "decomposition=spatial_svd",
            "decomposition.candidates=1",
            "decomposition.channels=[0.75,0.5,0.25]",
        ),
        *("budget.bytes=0.12", "selector=local", "hydra.run.dir=run"),
    )
    plan = CompressionPlan.load(Path("run/plan.json"))
    kept = kept_channels(plan)
    assert kept
    assert any(operation.kind == "quantise" for layer in plan for operation in layer.operations)
    metrics = read_json(Path("run/metrics.json"))
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert metrics["onnx"]["accuracy"] == pytest.approx(metrics["finetuned"]["accuracy"], abs=0.01)
    page = Path("run/report.html").read_text()
    for name, channels in kept.items():
        assert f"{len(channels)} of " in page, name
    candidates = read_json(Path("run/candidates.json"))
    assert any("reads" in each["operations"][0] for site in candidates.values() for each in site[:-1])
    rankrl(*("task=evaluate", *small_network(tmp_path), "weights=run/model.safetensors"))


def test_fractions_out_of_range_are_refused(tmp_path: Path) -> None:
    message = task_refusal(*small_network(tmp_path), "decomposition.channels=[1.5]", "budget.macs=0.5")
    assert "decomposition.channels: 1.5 is outside (0, 1)" in message


@pytest.mark.slow
def test_blocks_leave_the_network_within_one_search(rankrl: Command, tmp_path: Path) -> None:
    options = {*QUICK, "model=resnet20", "dataset=digits", "dataset.train_images=256"}
    rankrl(
        *sorted(options - {"model=conv4"}),
        *("decomposition=spatial_svd", "decomposition.candidates=1", "decomposition.blocks=true"),
        *("budget.macs=0.15", "selector=local", "hydra.run.dir=run"),
    )
    plan = CompressionPlan.load(Path("run/plan.json"))
    blocks = removed_blocks(plan.chosen(RemoveBlock))
    assert blocks
    metrics = read_json(Path("run/metrics.json"))
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert f"removed with block {blocks[0]}" in Path("run/report.html").read_text()


NEEDED = pytest.mark.skipif(
    get_runtime("openvino").obstacle() is not None, reason=str(get_runtime("openvino").obstacle())
)


def exported(rankrl: Command, whole_run: Path, *options: str) -> dict[str, Any]:
    """Export the network of a finished run once more, in OpenVINO too; return the metrics."""
    rankrl(
        *("task=export", "model=conv4", f"model.checkpoint={whole_run / 'dense.safetensors'}"),
        *(f"weights={whole_run / 'model.safetensors'}", "export.runs=2", "export.batch=16"),
        *("export.runtimes=[openvino]", "hydra.run.dir=exported", *options),
    )
    return read_json(Path("exported/metrics.json"))


@pytest.mark.slow
@NEEDED
@pytest.mark.parametrize("options", [(), ("export.preprocess=true", "export.int8=false")])
def test_the_files_are_verified_and_timed_in_each(
    rankrl: Command, whole_run: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    section = exported(rankrl, whole_run, *options)["runtimes"]
    assert list(section) == ["onnxruntime", "openvino"]
    for entry in section.values():
        assert entry["max_abs_difference"] <= 1e-4
        assert entry["latency_ratio"] == pytest.approx(entry["baseline_latency_ms"] / entry["latency_ms"])
        assert entry["clock"] == "processor"
        assert ("dense_int8_latency_ms" in entry) == (not options)
        assert ("dense_int8_score" in entry) == (not options)
        assert 0 <= entry["score"] <= 1
    first, second = section.values()
    assert options or abs(first["dense_int8_score"] - second["dense_int8_score"]) <= 0.1
    assert sorted({*first.get("fastest", []), *second.get("fastest", [])}) == sorted(
        ["baseline", "exported", *(["dense_int8"] if not options else [])]
    )
    assert "openvino" in capsys.readouterr().out
    assert "Runtimes" in Path("exported/report.html").read_text()
    assert not list(Path("exported/state").glob("dense-int8*"))


@pytest.mark.slow
@NEEDED
def test_a_runtime_that_computes_something_else_is_warned_of_and_not_timed(
    rankrl: Command, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = measure.verify_onnx

    def differs(*args: Any, runtime: str, **options: Any) -> Any:
        if runtime == "openvino":
            raise ExportError("it differs")
        return original(*args, runtime=runtime, **options)

    monkeypatch.setattr(measure, "verify_onnx", differs)
    section = exported(rankrl, whole_run)["runtimes"]
    assert section["openvino"]["failed"] == "it differs"
    assert "latency_ms" not in section["openvino"]
    assert section["onnxruntime"]["latency_ms"] > 0
    assert "the files are not timed in openvino: it differs" in Path("exported/rankrl.log").read_text()


@pytest.mark.parametrize("task", ["pipeline", "prune", "export"])
def test_a_runtime_that_is_not_installed_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    message = task_refusal(f"task={task}", "export.runtimes=[onnxruntime,openvino]")
    assert message.startswith("export.runtimes: the runtime 'openvino' cannot be used here")
    assert "pip install 'rankrl[openvino]'" in message
    written = {path.name for path in tmp_path.rglob("*")}
    assert not [name for name in written if name.endswith((".onnx", ".safetensors"))]
    assert not written & {"metrics.json", "report.html"}


def test_unknown_runtimes_are_refused_with_the_nearest_name() -> None:
    message = task_refusal("export.runtimes=[openvin]")
    assert "export.runtimes: there is no runtime 'openvin'; choose from onnxruntime" in message
    assert "Did you mean 'openvino'?" in message
