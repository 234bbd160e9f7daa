"""`task=pretrain`: a policy from many tasks, which a search starts from; a killed run plays no task twice."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import QUICK, call, read_json, small_network, task_refusal, workplace

from rankrl.plan_search import pretraining
from rankrl.plan_search.agents.policy_file import PolicyFile

FITS = ("calibration.images=64", "decomposition.candidates=4", "decomposition.iterations=5")
PRETRAIN = (
    "task=pretrain",
    "pretrain.formats=[tucker,cp]",
    "pretrain.params=[0.3,0.2,0.0001]",
    "pretrain.macs=[]",
    "pretrain.plans=5",
    "search.images=100",
)


def made(folder: Path) -> tuple[str, ...]:
    return (*FITS, *PRETRAIN, *small_network(folder))


@pytest.fixture(scope="session")
def whole(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of one finished run, for all tests to read."""

    def fill(folder: Path) -> None:
        with workplace(folder):
            call(*made(folder), f"hydra.run.dir={folder / 'run'}")

    return made_once("pretraining", fill) / "run"


def test_the_card_names_every_task_that_can_be_reached(whole: Path) -> None:
    card = PolicyFile.load(whole / "policy.safetensors").card
    assert {(task.formats, *task.budgets.items()) for task in card.tasks} == {
        ((name,), ("params", fraction)) for name in ("tucker", "cp") for fraction in (0.3, 0.2)
    }
    assert {task.dataset for task in card.tasks} == {"digits"}
    assert len({task.network for task in card.tasks}) == 1
    assert card.hidden == (32, 32)
    assert "torch" in card.versions
    metrics = read_json(whole / "metrics.json")
    assert len(metrics["tasks"]) == 4
    assert all(each["unseen"] is not None for each in metrics["tasks"])
    assert len(metrics["warnings"]) == 2
    assert "cannot be reached" in metrics["warnings"][0]


def test_a_search_starts_from_the_policy(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "search"
    call(
        *("task=search", "selector=td3", f"selector.policy={whole / 'policy.safetensors'}"),
        *(*FITS, *small_network(tmp_path), "decomposition=tucker", "budget.params=0.25"),
        *("search.episodes=3", "search.images=100", f"hydra.run.dir={run}"),
    )
    with (run / "episodes.csv").open(newline="") as file:
        assert [row["phase"] for row in csv.DictReader(file)] == ["pretrained", "preset", "warm-up"]


def test_a_comparison_refuses_a_policy_that_was_trained_on_its_task(
    whole: Path, tmp_path: Path, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        call(
            *("task=compare", "selector=td3", f"selector.policy={whole / 'policy.safetensors'}"),
            *(*FITS, *small_network(tmp_path), "decomposition=tucker", "budget.params=0.3"),
            *("compare.selectors=[td3,greedy]", "compare.seeds=[0]", "finetune.epochs=0"),
            *("search.episodes=2", "search.images=100", f"hydra.run.dir={tmp_path / 'compare'}"),
        )
    assert ended.value.code == 2
    assert "trained on this very task" in " ".join(capsys.readouterr().err.split())


def test_a_killed_run_plays_no_task_twice(whole: Path, tmp_path: Path, monkeypatch) -> None:
    played, play_episodes = [], pretraining.play_episodes

    class Killed(BaseException):
        """Stands for the end of the process."""

    def dying(problem, *arguments, **options):
        if len(played) == 3:
            raise Killed
        played.append(problem.fingerprint)
        return play_episodes(problem, *arguments, **options)

    monkeypatch.setattr(pretraining, "play_episodes", dying)
    run = tmp_path / "run"
    with pytest.raises(Killed):
        call(*made(tmp_path), f"hydra.run.dir={run}")
    assert not (run / "policy.safetensors").exists()
    before = list(played)
    played.clear()
    call(f"resume={run}")
    assert len({*before, *played}) == len(before) + len(played) == 4
    finished, whole_run = (PolicyFile.load(folder / "policy.safetensors") for folder in (run, whole))
    assert finished.card == whole_run.card
    for one, other in zip(finished.layers, whole_run.layers, strict=True):
        assert all(bool((a == b).all()) for a, b in zip(one, other, strict=True))


def test_tasks_of_earlier_runs_are_added(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changed = tuple(each for each in made(tmp_path) if not each.startswith("pretrain.params"))
    call(*changed, "pretrain.params=[0.25]", f"pretrain.add=[{whole}]", f"hydra.run.dir={run}")
    tasks = PolicyFile.load(run / "policy.safetensors").card.tasks
    assert sorted(task.budgets["params"] for task in tasks) == [0.2, 0.2, 0.25, 0.25, 0.3, 0.3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("pretrain.networks=[{architecture: conv4}]", "conv4 has no checkpoint"),
        ("pretrain.networks=[{checkpoint: a.th}]", "names no architecture"),
        ("pretrain.add=[nowhere]", "nowhere holds no episodes"),
        ("pretrain.params=[2.0]", "budget.params=2.0 is outside"),
        ("pretrain.params=[]", "both empty"),
        ("pretrain.formats=[]", "pretrain.formats is empty; name formats, as in [tucker], or null"),
        ("pretrain.jitter=-1", "pretrain.jitter must not be negative"),
        ("pretrain.plans=0", "pretrain.plans must be at least 1"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: str, message: str) -> None:
    assert message in task_refusal(*made(tmp_path), options)


def test_wrong_options_are_told_in_one_paragraph(tmp_path: Path, refused: Callable[..., str]) -> None:
    message = refused(*made(tmp_path), "pretrain.jitter=-1")
    assert "pretrain.jitter must not be negative" in message
    assert "choose task=pretrain" in refused(*made(tmp_path), "task=search", "pretrain.plans=3")


def test_quick_options_apply_where_the_task_reads_them() -> None:
    """The options above are those of every quick run, so that fits are shared."""
    assert set(FITS) <= set(QUICK)
