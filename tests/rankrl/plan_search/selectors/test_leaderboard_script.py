"""The leaderboard judges plans on inputs that no search saw, and counts regrets to the best plan of all."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import leaderboard as script
import numpy as np
import pytest
import yaml
from leaderboard_tasks import Network, Task, opened, read_tasks
from made_inputs import MissingFileError

from rankrl.options.search import MEASURES

pytestmark = pytest.mark.slow

CONV4 = {"family": "plain", "dataset": "digits", "heldout": 200, "recipe": {"epochs": 1}}


def row(
    task: str, selector: str, evaluations: int, score: float, seed: int = 0, **others: str
) -> dict[str, str]:
    key = dict(zip(script.KEY, (task, selector, seed, 5, evaluations), strict=True))
    values = {"score": score, "seconds": 2.0}
    return {name: str(value) for name, value in {**key, **values}.items()}


@pytest.fixture
def small_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.yaml"
    absent = {"family": "audio", "file": "absent.onnx"}
    tasks = {"absent": ["cp macs 0.3"], "conv4": ["tucker params 0.0001", "tucker params 0.1"]}
    path.write_text(yaml.safe_dump({"networks": {"conv4": CONV4, "absent": absent}, "tasks": tasks}))
    return path


def test_there_are_enough_tasks_of_every_measure_and_family() -> None:
    tasks = read_tasks()
    assert len({task.name for task in tasks}) == len(tasks) >= 30
    assert {task.measure for task in tasks} == set(MEASURES)
    assert {task.runtime for task in tasks} == {"none", "onnxruntime", "openvino"}
    assert len({task.network.family for task in tasks}) >= 6
    assert len({task.layers for task in tasks}) >= 5
    assert {task.name for task in read_tasks(pattern="conv4 * latency*")} < {task.name for task in tasks}
    assert all(task.request().goal.budget.fractions for task in tasks)


def test_tables_answer_for_every_selector_that_needs_no_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["leaderboard.py", "--bench", "--tasks", "transformer tensor*", "--evaluations", "2"]
    monkeypatch.setattr("sys.argv", words)
    script.main()
    shown = capsys.readouterr()
    left_out = "transformer tensor_train macs 0.4: its surrogate does not answer, so it is left out"
    assert caplog.messages.count(left_out) == 1
    assert "1 table, 1 seed." in shown.out
    assert all(f"| `{name}` | " in shown.out for name in script.OF_TABLES)


def test_a_whole_task_is_run_once_and_judged_on_other_images(
    small_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RANKRL_CHECKPOINTS", str(tmp_path))
    words = ["leaderboard.py", "--folder", str(tmp_path / "runs"), "--rows", str(tmp_path / "rows.csv")]
    words += ["--yaml", str(small_yaml), "--evaluations", "2", "--picture", str(tmp_path / "drawn.png")]
    words += ["--selectors", "greedy", script.PREDICTED, "bayes"]
    monkeypatch.setattr("sys.argv", words)
    script.main()
    shown = capsys.readouterr()
    assert "absent cp macs 0.3: there is no absent.onnx in the folder RANKRL_CHECKPOINTS" in shown.err
    assert "conv4 tucker params 0.0001: budget.params=0.0001 cannot be reached" in shown.err
    rows = script.ResultRows(tmp_path / "rows.csv", script.KEY, script.VALUES).rows
    assert Counter(each["selector"] for each in rows) == dict.fromkeys(words[-3:], 3)
    assert {each["evaluations"] for each in rows} == {"0", "1", "2"}
    assert all(0 < float(each["score"]) <= 1 for each in rows)
    assert (tmp_path / "drawn.png").exists()
    monkeypatch.setattr("sys.argv", [*words, "--report", "--finetune", "3"])
    script.main()
    tuned = capsys.readouterr().out.splitlines()[-1]
    assert tuned.startswith("| conv4 tucker params 0.1 | ")
    assert tuned.count(" → ") == 2  # greedy with and without divergences
    monkeypatch.setattr(script, "opened", None)
    monkeypatch.setattr("sys.argv", [*words, "--tasks", "conv4 * 0.1"])
    script.main()
    assert capsys.readouterr().out.splitlines()[1:] == shown.out.splitlines()[1:]
    monkeypatch.setattr("sys.argv", [*words[:-3], "bayes", "--report"])
    with pytest.raises(SystemExit, match=r"compared with greedy; name it in --selectors"):
        script.main()


def test_judging_images_are_none_of_those_that_searches_see(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANKRL_CACHE", str(tmp_path / "cache"))
    task = Task.parse(Network("conv4", **CONV4), "tucker params 0.1")
    with opened(task, tmp_path, 1000) as ready:
        greedy = tuple(ready.session.problem.preset.tolist())
        score, accuracy = ready.judge(greedy)
        assert ready.session.evaluator.batches == 1
        assert accuracy is not None
        assert round(120 * accuracy, 6) == round(120 * accuracy)  # of the 120 that searches do not see
        assert score != ready.session.evaluator(greedy).score
    with (
        pytest.raises(SystemExit, match=r"not to 0\.99"),
        opened(
            replace(task, network=replace(task.network, name="other", model="conv4", accuracy=0.99)),
            tmp_path,
            9,
        ),
    ):
        pass


def test_a_missing_checkpoint_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANKRL_CHECKPOINTS", str(tmp_path))
    with pytest.raises(MissingFileError, match=r"there is no a\.pt"):
        _ = Network("a", "a", checkpoint="a.pt").path


@pytest.fixture
def rows() -> list[dict[str, str]]:
    scores = {
        ("a", "greedy"): [0.5, 0.5, 0.5],
        ("a", "random"): [0.3, 0.4, 0.8],
        ("b", "greedy"): [0.7, 0.7, 0.7],
        ("b", "random"): [0.1, 0.2, 0.6],
    }
    found = [
        row(task, name, end, score)
        for (task, name), values in scores.items()
        for end, score in zip((0, 1, 5), values, strict=True)
    ]
    found += [row("a", "random", end, 0.6, seed=1) for end in (0, 1, 5)]
    return [*found, *(row("c", "greedy", end, 0.2) for end in (0, 1, 5))]


def test_regrets_are_taken_to_the_best_plan_of_all_and_averaged_over_seeds(rows) -> None:
    board = script.Board.of(rows, 5)
    assert (board.selectors, board.tasks, board.evaluations) == (("greedy", "random"), ("a", "b"), (0, 1, 5))
    assert board.of_selector("greedy", 5) == pytest.approx([0.3, 0.0])
    assert board.of_selector("random", 0) == pytest.approx([0.8 - 0.45, 0.7 - 0.1])
    assert board.of_selector("random", 5) == pytest.approx([0.1, 0.1])
    assert (board.against("random", 0), board.against("random", 5)) == ("0 / 2", "1 / 1")


def test_the_table_puts_the_least_regret_first(rows) -> None:
    lines = script.report(script.Board.of(rows, 5)).splitlines()
    assert lines[0].startswith("| selector | regret at 0 | regret at 5 | less regret than greedy at 0 |")
    assert lines[2].startswith("| `random` | 47.50 (35.00 to 60.00) | 10.00 (10.00 to 10.00) | -32.50 (")
    assert lines[2].endswith("| 0 / 2 | 1 / 1 | 2.0 |")
    assert lines[3].startswith("| `greedy` | 15.00 (0.00 to 30.00) | 15.00 (0.00 to 30.00) |")


def test_the_interval_covers_the_mean_as_the_normal_one_does() -> None:
    values = np.random.default_rng(1).normal(3, 2, size=400)
    low, high = script.interval(values)
    assert (low, high) == pytest.approx((values.mean() - 0.196, values.mean() + 0.196), abs=0.02)


def test_the_picture_has_a_line_for_each_selector_that_ends_no_worse_than_greedy(rows) -> None:
    rows += [row(task, "uniform", end, 0.1) for task in "ab" for end in (0, 1, 5)]
    (axes,) = script.picture(script.Board.of(rows, 5)).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert set(drawn) == {"greedy", "random"}
    assert drawn["random"] == pytest.approx([47.5, 40.0, 10.0])
    assert drawn["greedy"] == pytest.approx([15.0] * 3)
