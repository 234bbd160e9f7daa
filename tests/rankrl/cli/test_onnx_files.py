"""`model=onnx` on the command line."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import read_json, task_refusal, with_effect
from onnx import helper
from small_graphs import convolutions, images, model_of, recorded_states, save_photos, with_state

from decomposition import CompressionPlan
from rankrl.cli.app import COLLAPSED, checked_arguments
from rankrl.errors import RankrlError

FILES = ("model=onnx", "model.path=net.onnx", "dataset=inputs", "dataset.path=inputs.npz")
LITTLE = (
    "decomposition.candidates=3",
    "decomposition.iterations=5",
    "decomposition.final_iterations=5",
    "export.runs=2",
    "export.batch=2",
    "tracking=none",
    "hydra.run.dir=run",
)


@pytest.fixture(autouse=True)
def _files(_own_folders: None) -> None:
    onnx.save(convolutions(), "net.onnx")
    np.savez("inputs.npz", x=images(), labels=np.arange(60))


def refused(rankrl: Callable[..., None], capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        rankrl(*arguments)
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert len(shown.strip().splitlines()) == 1
    return shown


def told(*arguments: str) -> str:
    """Return why a command line is refused, by the checks before the task or by the task itself."""
    arguments = with_effect(*arguments)
    try:
        checked_arguments(arguments)
    except RankrlError as refused:
        return str(refused)
    return task_refusal(*arguments)


def test_a_file_becomes_a_smaller_one(
    rankrl: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("net.onnx").read_bytes()
    rankrl(*FILES, *LITTLE, "budget.params=0.7")
    metrics = read_json(Path("run/metrics.json"))
    assert metrics["ratios"]["params"] >= 1 / 0.7
    assert metrics["compressed"]["agreement"] > 0.5
    assert metrics["warnings"] == []
    assert (metrics["budget"], metrics["heldout_inputs"], metrics["rewritten"]) == ({"params": 0.7}, 12, {})
    assert [layer.name for layer in CompressionPlan.load("run/plan.json")] == ["first", "second", "last"]
    assert Path("net.onnx").read_bytes() == before
    assert onnx.load("run/model.onnx").graph.output[0].name == "y"
    assert "second" in Path("run/report.html").read_text()
    shown = capsys.readouterr().out
    assert "Agreement with the original on 12 held-out inputs" in " ".join(shown.split())
    assert "for an agreement of" in " ".join(shown.split())
    assert "fewer" in shown
    assert "held-out images" not in Path("run/report.html").read_text()


def test_the_axes_that_count_inputs_are_stated(rankrl: Callable[..., None]) -> None:
    onnx.save(with_state((0, 1, 2), [2, "n", 16]), "net.onnx")
    np.savez("inputs.npz", **recorded_states(60))
    axes = "dataset.batch_axes={x: 0, state: 1, rate: null}"
    rankrl(*FILES, *LITTLE, "budget.params=0.7", axes, "decomposition=tucker")
    assert read_json(Path("run/metrics.json"))["heldout_inputs"] == 12
    for task in (("budget.params=0.7",), ("task=apply", "plan=run/plan.json"), ("task=inspect",)):
        message = told(*task, *FILES, "dataset.batch_axes={state: 0}")
        assert "the axes that count them: 'x' 60 (axis 0), 'state' 2 (axis 0)" in message
    assert "batch_axes must be a mapping" in told(*FILES, "budget.params=0.7", "dataset.batch_axes=1")


def test_a_ruined_network_is_warned_of(rankrl: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankrl.cli.tasks.compression._LITTLE", 1.1)
    rankrl(*FILES, *LITTLE, "budget.params=0.7")
    (warning,) = read_json(Path("run/metrics.json"))["warnings"]
    assert "of 1, on 12 held-out inputs: ask for a larger budget" in warning


def test_a_collapsed_network_has_an_exit_code_of_its_own(
    rankrl: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankrl.networks.graph.collapse", lambda *_: "nothing is left of it. Look")
    with pytest.raises(SystemExit) as left:
        rankrl(*FILES, *LITTLE, "budget.params=0.7")
    assert left.value.code == COLLAPSED == 4
    assert read_json(Path("run/metrics.json"))["warnings"] == ["nothing is left of it. Look"]
    assert "nothing is left of it" in Path("run/report.html").read_text()
    assert "[ERROR] - nothing is left" in Path("run/rankrl.log").read_text()
    shown = capsys.readouterr()
    assert "warning: nothing is left of it" in shown.out
    assert shown.err.strip() == "rankrl: the run is finished, but nothing is left of it. Look."


def test_inspect_lists_the_nodes(rankrl: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    model = convolutions()
    weight = onnx.numpy_helper.from_array(np.ones((32, 1, 1, 1), np.float32), "apart")
    model.graph.initializer.append(weight)
    pool = next(node for node in model.graph.node if node.name == "pool")
    apart = helper.make_node("Conv", [pool.input[0], "apart"], ["scaled"], "apart", group=32)
    pool.input[0] = "scaled"
    model.graph.node.insert(4, apart)
    onnx.save(model, "net.onnx")
    rankrl("task=inspect", *FILES, "tracking=none")
    shown = " ".join(capsys.readouterr().out.split())
    assert "second" in shown
    assert "grouped convolution (group=32)" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model.path=missing.onnx", "budget.params=0.5"), r"no ONNX file at missing\.onnx"),
        (("model.path=inputs.npz", "budget.params=0.5"), r"inputs\.npz is no ONNX file"),
        (("dataset.path=net.onnx", "budget.params=0.5"), r"net\.onnx cannot be read"),
        (("task=compare", "budget.params=0.5"), r"task=compare has no use for model=onnx"),
        (("decomposition=tensor_ring", "budget.params=0.5"), r"tensor_ring cannot be written"),
        (
            ("selector=bayes", "search.metric=accuracy", "budget.params=0.5"),
            r"search\.metric must be one of agree",
        ),
        (("selector=bayes", "search.episodes=0", "budget.params=0.5"), r"search\.episodes must be positive"),
        (("task=apply",), r"task=apply needs plan=RUN/plan\.json"),
        (("finetune.epochs=2", "budget.params=0.5"), r"finetune\.epochs=2 has no effect"),
        (("search.episodes=2", "budget.params=0.5"), r"search\.episodes=2 has no effect"),
    ],
)
def test_mistakes_are_refused(arguments: tuple[str, ...], message: str) -> None:
    assert re.search(message, told(*FILES, *LITTLE, *arguments))


def test_the_two_go_together() -> None:
    assert "dataset=inputs" in told("model=onnx", "model.path=net.onnx", "budget.params=0.5")
    assert "model=onnx" in told("dataset=inputs", "dataset.path=inputs.npz", "budget.params=0.5")


def test_a_mistake_is_told_in_one_paragraph_and_leaves_no_file(
    rankrl: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("net.onnx").read_bytes()
    assert "cannot be reached" in refused(rankrl, capsys, *FILES, *LITTLE, "budget.params=0.0001")
    assert Path("net.onnx").read_bytes() == before
    assert not Path("run/model.onnx").exists()


def test_a_network_without_nodes_to_compress() -> None:
    onnx.save(
        model_of([helper.make_node("Relu", ["x"], ["y"])], {}, {"x": ["n", 3]}, {"y": ["n", 3]}), "net.onnx"
    )
    np.savez("inputs.npz", x=np.ones((9, 3), np.float32))
    assert "no node that can be compressed" in told(*FILES, *LITTLE, "budget.params=0.5")


def test_a_folder_of_images_is_compressed_with_what_was_said_of_them(rankrl: Callable[..., None]) -> None:
    save_photos(Path("photos"))
    options = ("dataset.path=photos", "dataset.size=16", "dataset.std=[0.2,0.2,0.2]")
    rankrl(*FILES[:-1], *options, *LITTLE, "budget.params=0.7")
    said = read_json(Path("run/metrics.json"))["preprocessing"]
    assert said["size"] == 16
    assert said["std"] == [0.2, 0.2, 0.2]
    assert said["order"] == "rgb"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("dataset.path=photos", "dataset.flip=true"), "it means nothing for dataset=inputs"),
        (("dataset.path=inputs.npz", "dataset.size=16"), "dataset.size is for a folder of images"),
        (("dataset.path=photos",), r"say which \(dataset.size=224"),
    ],
)
def test_options_of_images_that_do_not_apply_are_refused(options: tuple[str, ...], message: str) -> None:
    save_photos(Path("photos"))
    assert re.search(message, told(*FILES[:-1], *options, *LITTLE, "budget.params=0.7"))


def test_a_plan_is_searched_and_applied_again(rankrl: Callable[..., None]) -> None:
    search = ("selector=random", "search.episodes=4", "search.metric=agreement", "reward=weighted")
    rankrl(*FILES, *LITTLE, *search, "budget.params=0.2")
    metrics = read_json(Path("run/metrics.json"))
    assert metrics["search"]["episodes"] == 4
    assert metrics["selector"] == "random"
    assert len(Path("run/episodes.csv").read_text().splitlines()) == 5
    assert metrics["ratios"]["params"] >= 5
    rankrl("task=apply", "plan=run/plan.json", *FILES, *LITTLE[1:-1], "hydra.run.dir=again")
    again = read_json(Path("again/metrics.json"))
    assert again["compressed"]["params"] == metrics["compressed"]["params"]
    assert CompressionPlan.load("again/plan.json") == CompressionPlan.load("run/plan.json")
    assert onnx.load("again/model.onnx").graph.output[0].name == "y"


def test_nodes_that_are_left_out_are_listed_and_stay(
    rankrl: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    rankrl("task=inspect", *FILES, "tracking=none", "decomposition.skip=[second]")
    assert "stays as it is, as asked" in " ".join(capsys.readouterr().out.split())
    rankrl(*FILES, *LITTLE, "budget.params=0.99", "decomposition.skip=[second]")
    assert CompressionPlan.load("run/plan.json")["second"].operations == ()
