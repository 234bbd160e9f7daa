"""What a command sets and would not be looked at is refused, with the reason and what to do."""

import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from command_line import QUICK, SmallNetwork, check_overrides, read_json, small_network, values

from decomposition import LayerPlan, apply_plan, plan_by_heuristic, save_compressed
from rankrl.cli.app import BUDGET_MISSED, COLLAPSED
from rankrl.cli.config.checks import IDLE, check_effect
from rankrl.data import load_dataset
from rankrl.errors import ConfigError
from rankrl.models import checkpoint_heldout, load_checkpoint, save_checkpoint
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.timing.latency import RelativeTime
from rankrl.training import TrainingRecipe, train

FILE = ("model=onnx", "model.path=net.onnx", "dataset.path=inputs.npz")
CASES = [
    ("search", ("task=train", "search.episodes=5"), r"search\.episodes=5 .* task=train does not read it"),
    ("selector", ("task=evaluate", "selector=greedy"), r"selector=greedy .* choose task=pipeline, search"),
    ("reward", ("task=apply", "reward=amc"), r"reward=amc .* does not read it"),
    ("budget", ("task=evaluate", "budget.params=0.4"), r"budget\.params=0\.4 has no effect: task=evaluate"),
    ("calibration", ("task=train", "calibration.images=5"), r"images=5 .* does not read it"),
    ("decomposition", ("task=finetune", "decomposition=cp"), r"decomposition=cp .* does not read it"),
    ("finetune", ("task=search", "finetune.epochs=3"), r"epochs=3 .* task=search does not read it"),
    ("optim", ("task=search", "optim=sgd"), r"optim=sgd .* task=search does not read it"),
    ("train", ("task=evaluate", "train.epochs=3"), r"epochs=3 .* does not read it"),
    ("export", ("task=evaluate", "export.preprocess=true"), r"preprocess=true .* does not read it"),
    ("export.runtimes", ("task=search", "export.runtimes=[openvino]"), r"\['openvino'\] .* task=search does"),
    ("export.skip", ("task=export", "export.skip=true"), r"skip=true .* choose task=pipeline or prune$"),
    ("pruner", ("task=search", "pruner=magnitude"), r"pruner=magnitude has no effect: task=search"),
    ("prune", ("prune.decompose_macs=0.5",), r"prune\.decompose_macs=0\.5 .* choose task=prune$"),
    ("compare", ("task=search", "compare.seeds=[4]"), r"compare\.seeds=\[4\] .* choose task=compare"),
    (
        "finetune",
        ("task=compare", "compare.apply=false", "finetune.epochs=3"),
        r"epochs=3 .* applies no plan",
    ),
    ("optim", ("task=compare", "compare.apply=false", "optim=sgd"), r"optim=sgd .* applies no plan"),
    ("inspect", ("inspect.errors=true",), r"errors=true .* task=pipeline does not read it"),
    ("plan", ("task=pipeline", "plan=runs/a/plan.json"), r"plan=runs/a/plan\.json .* task=apply"),
    ("weights", ("task=apply", "weights=a.safetensors"), r"weights=a\.safetensors .* evaluate or export$"),
    ("run", ("task=train", "run=runs/a"), r"run=runs/a .* task=finetune, evaluate"),
    ("runs", ("task=train", "runs=multirun/a"), r"runs=multirun/a .* task=report"),
    ("search", ("task=prune", "search.episodes=9"), r"episodes=9 .* set prune\.decompose_params"),
    ("selector", ("task=prune", "selector=bayes"), r"selector=bayes .* task=prune decomposes nothing"),
    ("reward", ("task=prune", "reward=amc"), r"reward=amc .* set prune\.decompose_params"),
    ("decomposition", ("task=prune", "decomposition=cp"), r"=cp .* set prune\.decompose_params"),
    ("prune.finetune_epochs", ("task=prune", "prune.finetune_epochs=2"), r"epochs=2 .* decomposes nothing"),
    ("budget.bytes", ("task=prune", "budget.bytes=0.3"), r"bytes=0\.3 .* set budget\.params or budget\.macs"),
    ("budget.memory", ("task=prune", "budget.memory=0.3"), r"memory=0\.3 .* set budget\.params"),
    (
        "budget.latency",
        ("task=prune", "prune.decompose_macs=0.5", "budget.latency=0.3"),
        r"latency=0\.3 .* removes channels to a fraction of what is counted; set budget\.params",
    ),
    ("calibration", ("task=inspect", "calibration.images=9"), r"images=9 .* set inspect\.errors=true"),
    ("finetune.teacher_model", ("finetune.teacher_model=resnet56",), r"set that, too"),
    ("finetune.teacher_options", ("+finetune.teacher_options.width=8",), r"goes with finetune\.teacher;"),
    (
        "finetune.teacher",
        ("finetune.teacher=a.pt", "finetune.distillation=0"),
        r"a\.pt .* learns from labels alone",
    ),
    ("train", ("model.checkpoint=a.th", "train.epochs=3"), r"epochs=3 .* model\.checkpoint is set"),
    ("timing.table", ("timing.table=a.json",), r"table=a\.json .* it goes with budget\.latency"),
    (
        "decomposition.formats",
        ("decomposition=tucker", "decomposition.formats=[cp,tucker]"),
        r"decomposition\.formats=.* choose decomposition=auto",
    ),
    (
        "decomposition.tensorised",
        ("decomposition=cp", "decomposition.tensorised=true"),
        r"decomposition\.tensorised=true .* decomposition=tensor_ring",
    ),
    (
        "search.refit_images",
        ("search.refit_images=50", "search.statistics=corrected"),
        r"refit_images=50 .* set search\.statistics=refitted",
    ),
    ("search.cluster", ("search.cluster=ray",), r"cluster=ray .* goes with search\.workers"),
    ("search.worker_cpus", ("search.worker_cpus=2",), r"worker_cpus=2 .* goes with search\.workers"),
    ("search.worker_gpus", ("search.worker_gpus=1",), r"worker_gpus=1 .* goes with search\.workers"),
    *(
        (
            option,
            ("model=onnx", "model.path=net.onnx", argument),
            r"has no effect: model=onnx compresses a file",
        )
        for option, argument in (
            ("calibration", "calibration.images=5"),
            ("finetune", "finetune.epochs=3"),
            ("optim", "optim=sgd"),
            ("train", "train.epochs=3"),
            ("decomposition.sequential", "decomposition.sequential=true"),
            ("export.opset", "export.opset=18"),
            ("export.preprocess", "export.preprocess=true"),
            ("export.int8", "export.int8=true"),
            ("export.training", "export.training=true"),
            ("export.pad_channels", "export.pad_channels=true"),
            ("export.skip", "export.skip=true"),
            ("export.input_names", "export.input_names=[x]"),
            ("export.output_names", "export.output_names=[y]"),
            ("search.images", "search.images=50"),
            ("search.augmented", "search.augmented=true"),
            ("search.statistics", "search.statistics=refitted"),
            ("search.workers", "search.workers=2"),
        )
    ),
    *(
        (option, ("task=compare", "bench=a", argument), r"has no effect: bench=a searches tables")
        for option, argument in (
            ("seed", "seed=3"),
            ("model", "model=resnet56"),
            ("dataset", "dataset.heldout=5"),
            ("decomposition", "decomposition=cp"),
            ("budget", "budget.params=0.3"),
            ("reward", "reward=amc"),
            ("calibration", "calibration.images=5"),
            ("finetune", "finetune.epochs=3"),
            ("optim", "optim=sgd"),
            ("train", "train.epochs=3"),
            ("export", "export.runs=5"),
            ("compare.apply", "compare.apply=true"),
            ("search.images", "search.images=50"),
            ("search.augmented", "search.augmented=true"),
            ("search.refit_images", "search.refit_images=50"),
            ("search.metric", "search.metric=accuracy"),
            ("search.statistics", "search.statistics=refitted"),
            ("search.finalists", "search.finalists=2"),
            ("search.workers", "search.workers=2"),
        )
    ),
    ("bench", ("task=search", "bench=a"), r"bench=a .* choose task=compare$"),
    *(
        (section, (*FILE, option), rf"{option} .* is a rule")
        for section, option in (("search", "search.episodes=5"), ("reward", "reward=amc"))
    ),
    *(
        (f"search.{name}", ("selector=greedy", f"search.{name}=5"), rf"search\.{name}=5 .* is a rule")
        for name in ("episodes", "plans", "seconds", "patience", "finalists")
    ),
    *(
        (f"dataset.{name}", (*FILE, f"dataset.{name}={value}"), r"means nothing for dataset=inputs")
        for name, value in (("heldout", 5), ("train_images", 5), ("padding", 2), ("flip", "true"))
    ),
]


def check(arguments: tuple[str, ...]) -> None:
    check_effect(values(*arguments), [each.lstrip("+").partition("=")[0] for each in arguments])


def test_every_rule_has_its_case() -> None:
    assert sorted(each for idle in IDLE for each in idle.options) == sorted(each for each, _, _ in CASES)


@pytest.mark.parametrize(("option", "arguments", "message"), CASES)
def test_options_without_effect_are_refused(option: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check(arguments)
    assert str(refused.value).startswith(option)


@pytest.mark.parametrize(
    "arguments",
    [
        ("task=train", "train.epochs=3", "model.checkpoint=a.th"),
        ("task=search", "train.epochs=3", "export.runs=5", "budget.latency=0.5"),
        ("task=apply", "plan=a.json", "calibration.images=64", "train.epochs=2"),
        ("task=finetune", "weights=a.safetensors", "finetune.epochs=3", "optim=sgd"),
        ("task=export", "weights=a.safetensors", "export.training=true", "optim=sgd"),
        ("task=search", "budget.params=0.4"),
        ("task=timing_kit", "decomposition=auto", "calibration.images=64", "export.batch=1"),
        ("budget.latency=0.5", "timing.table=a.json"),
        ("task=prune", "pruner=magnitude", "pruner.multiple=8", "prune.decompose_macs=0.5"),
        ("task=prune", "prune.decompose_macs=0.5", "selector=bayes", "decomposition=cp"),
        ("task=compare", "compare.seeds=[4]"),
        ("task=compare", "bench=[a,b c]", "compare.latex=true", "search.plans=9", "selector=ddpg"),
        ("task=apply", "plan=runs/a/plan.json"),
        ("task=apply", "plan=a.json", "model=onnx", "model.path=net.onnx", "export.batch=4"),
        ("model=onnx", "model.path=net.onnx", "export.runtimes=[openvino]", "export.runtime=openvino"),
        ("model=onnx", "model.path=net.onnx", "selector=bayes", "search.episodes=5", "reward=amc"),
        ("task=export", "weights=a.safetensors"),
        ("task=report", "runs=multirun/a"),
        ("decomposition=auto", "decomposition.formats=[cp,tucker]"),
        ("decomposition=tensor_train", "decomposition.tensorised=true"),
        ("decomposition=cp", "decomposition.tensorised=false"),
        ("search.refit_images=50",),
        ("search.statistics=refitted", "search.refit_images=50"),
        ("search.workers=2", "search.cluster=ray", "search.worker_gpus=1"),
        ("task=evaluate", "budget.params=null"),
    ],
)
def test_options_with_an_effect_and_those_that_ask_for_nothing_pass(arguments: tuple[str, ...]) -> None:
    check(arguments)


def test_the_command_line_is_looked_at() -> None:
    check_overrides(["task=train", "train.epochs=3"])
    with pytest.raises(ConfigError, match=r"^search\.episodes=5 has no effect: task=train"):
        check_overrides(["task=train", "search.episodes=5"])


def test_each_job_of_a_sweep_is_looked_at() -> None:
    with pytest.raises(ConfigError, match=r"decomposition\.tensorised=true has no effect"):
        check_overrides(["-m", "decomposition=tensor_ring,tucker", "decomposition.tensorised=true"])


def test_plans_that_lose_blocks_are_not_refitted_unless_that_is_asked_for() -> None:
    arguments = ("search.refit_images=50", "decomposition.blocks=true", "budget.macs=0.5")
    with pytest.raises(ConfigError, match=r"refit_images=50 .* set search\.statistics=refitted"):
        check(arguments)


Command = Callable[..., None]
SHORT = (*QUICK, "selector=random", "search.episodes=2")
OF_TASK = {
    "compare": ("compare.selectors=[greedy]", "compare.seeds=[0]"),
    "prune": ("pruner=magnitude", "export.int8=false"),
}
NOTE = "The checkpoint may have been trained on these held-out images"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small network that is far better than guessing."""
    path, model = tmp_path_factory.mktemp("weights") / "trained.safetensors", SmallNetwork(10)
    train(model, load_dataset("digits"), TrainingRecipe(epochs=5, lr=1e-2, batch_size=64))
    save_checkpoint(model, path)
    return path


@pytest.mark.parametrize(
    "task", [pytest.param("pipeline", marks=pytest.mark.slow), "search", "prune", "compare"]
)
def test_compressing_a_network_that_has_learned_nothing_is_warned_of_everywhere(
    rankrl: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    folder = tmp_path / "run"
    arguments = (*small_network(tmp_path), f"task={task}", *OF_TASK.get(task, ()))
    rankrl(*(QUICK if task == "prune" else SHORT), *arguments, f"hydra.run.dir={folder}")
    warning, *others = read_json(folder / "metrics.json")["warnings"]
    assert all(each.startswith("fine-tune: the accuracy") for each in others)
    assert re.match(r"The network is hardly better than guessing: it answers [\d.]+ % of 287 h", warning)
    assert "small.safetensors was trained on this dataset" in warning
    assert f"[WARNING] - {warning}" in (folder / "rankrl.log").read_text()
    page = (folder / "report.html").read_text()
    assert page.index("hardly better than guessing") < page.index("<main>")
    assert f"warning: {warning}" in capsys.readouterr().out


def test_a_training_that_learns_nothing_is_warned_of_with_its_rate(rankrl: Command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    training = ("train.epochs=1", "train.optim.lr=1e-6", "dataset.train_images=64")
    rankrl("task=train", *small_network(tmp_path)[:2], *training, f"hydra.run.dir={folder}")
    (warning,) = read_json(folder / "metrics.json")["warnings"]
    assert "trained for 1 epoch (train.epochs) at the learning rate 1e-06 (train.optim.lr)" in warning


@pytest.mark.parametrize("task", ["search", pytest.param("compare", marks=pytest.mark.slow)])
def test_a_checkpoint_is_noted_beside_held_out_accuracies_and_a_search_reads_no_test_image(
    rankrl: Command,
    tmp_path: Path,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    task: str,
) -> None:
    if task == "search":  # the judgement of its network reads none either
        refuse = "rankrl.data.images.TestImages.for_report"
        monkeypatch.setattr(refuse, lambda _: pytest.fail("test images read"))
    folder = tmp_path / "run"
    arguments = (f"task={task}", *small_network(tmp_path)[:2], f"model.checkpoint={trained}")
    rankrl(*SHORT, *OF_TASK.get(task, ()), *arguments, f"hydra.run.dir={folder}")
    metrics = read_json(folder / "metrics.json")
    assert metrics["warnings"] == []
    assert metrics["checkpoint"] == "trained.safetensors"
    assert NOTE in capsys.readouterr().out
    assert NOTE in (folder / "report.html").read_text()


def test_a_checkpoint_that_says_what_was_held_out_has_no_note(
    rankrl: Command, tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network, path, data = SmallNetwork(10), tmp_path / "own.safetensors", load_dataset("digits")
    load_checkpoint(network, trained)
    save_checkpoint(network, path, heldout=data.heldout.digest())
    arguments = ("task=search", *small_network(tmp_path)[:2], f"model.checkpoint={path}")
    rankrl(*SHORT, *arguments, f"hydra.run.dir={tmp_path / 'run'}")
    assert read_json(tmp_path / "run" / "metrics.json")["heldout_is_new"] is True
    assert NOTE not in capsys.readouterr().out + (tmp_path / "run" / "report.html").read_text()


def test_training_on_from_weights_of_unknown_origin_holds_nothing_out(
    rankrl: Command, tmp_path: Path, trained: Path
) -> None:
    own = tmp_path / "own.safetensors"
    network, data = SmallNetwork(10), load_dataset("digits")
    load_checkpoint(network, trained)
    save_checkpoint(network, own, heldout=data.heldout.digest())
    arguments = ("task=train", "train.epochs=1", *small_network(tmp_path)[:2])
    for start, known in ((trained, None), (own, data.heldout.digest())):
        folder = tmp_path / start.stem
        rankrl(*arguments, f"model.checkpoint={start}", f"hydra.run.dir={folder}")
        assert checkpoint_heldout(folder / "dense.safetensors") == known


def test_a_network_trained_here_has_not_seen_the_held_out_images(
    whole_run: Path, shown_by_whole_run: str
) -> None:
    metrics = read_json(whole_run / "metrics.json")
    assert metrics["checkpoint"] is None
    assert "held-out images" in shown_by_whole_run
    assert NOTE not in shown_by_whole_run + (whole_run / "report.html").read_text()
    assert metrics["trainings"] == {
        "train": {"lr": 0.02, "halvings": 0, "epochs": 2, "epoch": metrics["trainings"]["train"]["epoch"]},
        "finetune": {"lr": 1e-4, "halvings": 0, "epochs": 1, "epoch": 0},
    }


@pytest.mark.parametrize("lost", [False, True])
def test_a_fine_tuning_without_a_better_epoch_is_warned_of_where_something_was_lost(
    rankrl: Command, tmp_path: Path, trained: Path, lost: bool
) -> None:
    dense, folder = SmallNetwork(10), tmp_path / "run"
    load_checkpoint(dense, trained)
    plan = plan_by_heuristic(dense, (1, 8, 8), "tucker", "uniform", 0.1)
    if not lost:
        plan = dataclasses.replace(plan, layers=tuple(LayerPlan(each.name, reason="stays") for each in plan))
    network = apply_plan(dense, plan)
    if lost:
        network.load_state_dict({name: 0 * value for name, value in network.state_dict().items()})
    save_compressed(network, plan, tmp_path / "small.safetensors", dense=dense)
    with pytest.raises(SystemExit) if lost else nullcontext() as stopped:
        rankrl(
            *(*QUICK, "task=finetune", "model=custom", "model._target_=command_line.SmallNetwork"),
            *(f"model.checkpoint={trained}", f"weights={tmp_path / 'small.safetensors'}"),
            *(
                "finetune.restore_best=true",
                "optim.lr=1e-12",
                f"hydra.run.dir={folder}",
            ),  # no epoch can be better
        )
    if stopped is not None:
        assert stopped.value.code == COLLAPSED
    said = (folder / "rankrl.log").read_text()
    assert re.search(r"no epoch was better .* before \([\d.]+ %, the dense one [\d.]+ %\)", said)
    assert ("There was nothing to win back" in said) is not lost
    assert "No epoch was better than the network before training" in (folder / "report.html").read_text()
    warnings = read_json(folder / "metrics.json")["warnings"]
    told = ["Try another learning rate (optim.lr)", "has collapsed: it answers 10.0% of 359 inputs right"]
    assert [text in each for text, each in zip(told, warnings, strict=lost)] == [True] * 2 * lost


@pytest.mark.slow
def test_a_rate_that_diverges_is_halved_and_both_are_told(rankrl: Command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rankrl(
        *("task=train", "model=conv4", "train.batch_size=16", "train.epochs=2", "train.optim.lr=0.8"),
        f"hydra.run.dir={folder}",
    )
    metrics = read_json(folder / "metrics.json")
    training = metrics["trainings"]["train"]
    assert training["halvings"] > 0
    assert training["lr"] == 0.8 / 2 ** training["halvings"]
    assert "diverged at the learning rate 0.8; after" in metrics["warnings"][0]
    assert f"it was followed to the end at {training['lr']:.3g}" in metrics["warnings"][0]
    assert "half the highest rate, 0.4 (halving 1 of 4)" in (folder / "rankrl.log").read_text()


@pytest.mark.slow
def test_a_missed_budget_in_time_leaves_the_nearest_plan_and_an_exit_code(
    rankrl: Command,
    dense: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # By what two timings of one file differ: near enough to search, not near enough to keep the promise.
    monkeypatch.setattr(LatencyBudget, "measured", lambda self, plan: RelativeTime(1.001 * self.fraction))
    folder = tmp_path / "run"
    command = (*SHORT, "task=search", dense, "budget.latency=0.9", f"hydra.run.dir={folder}")
    with pytest.raises(SystemExit) as stopped:
        rankrl(*command)
    assert stopped.value.code == BUDGET_MISSED
    warning = read_json(folder / "metrics.json")["warnings"][-1]
    assert warning.startswith("budget.latency=0.9 is missed: ")
    assert "it keeps 0.901 of" in warning
    assert (folder / "plan.json").exists()
    shown = capsys.readouterr()
    assert f"warning: {warning}" in shown.out
    assert (
        shown.err.strip().splitlines()[-1].startswith("rankrl: the run is finished, but budget.latency=0.9")
    )
