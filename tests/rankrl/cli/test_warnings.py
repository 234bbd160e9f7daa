"""What a run says of a network that has learned nothing, of its learning rates, and of its checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from command_line import QUICK, SmallNetwork, read_json, small_network

from decomposition import LayerPlan, apply_plan, plan_by_heuristic, save_compressed
from rankrl.cli.app import BUDGET_MISSED, COLLAPSED
from rankrl.data import load_dataset
from rankrl.models import checkpoint_heldout, load_checkpoint, save_checkpoint
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.timing.latency import RelativeTime
from rankrl.training import TrainingRecipe, train

Command = Callable[..., None]
SHORT = (*QUICK, "selector=greedy", "search.episodes=1")
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
    rankrl: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
) -> None:
    folder = tmp_path / "run"
    arguments = (*small_network(tmp_path), f"task={task}", *OF_TASK.get(task, ()))
    rankrl(*(QUICK if task == "prune" else SHORT), *arguments, f"hydra.run.dir={folder}")
    (warning,) = read_json(folder / "metrics.json")["warnings"]
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
        "train": {"lr": 0.02, "halvings": 0, "epochs": 2},
        "finetune": {"lr": 1e-4, "halvings": 0, "epochs": 1},
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
