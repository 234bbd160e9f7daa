"""`task=prune` on digits with a small network."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import QUICK, Killed, kill, read_json, refusal, small_network, task_refusal
from torch import Tensor, nn

from decomposition import CompressionPlan, Factorise
from rankrl.operations import kept_channels

Command = Callable[..., None]
Refused = Callable[..., str]
MASKS = ("pruner.epochs=3",)
PRUNED_THEN_TUCKER = (
    *("pruner=magnitude", "budget.macs=0.6", "prune.decompose_params=0.5"),
    *("selector=greedy", "decomposition=tucker"),
)


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    return small_network(tmp_path)


@pytest.fixture
def prune(rankrl: Command, small: tuple[str, ...], tmp_path: Path) -> Callable[..., Path]:
    """Prune the small network, in a folder of the given name, and return the folder."""

    def task(name: str, *arguments: str) -> Path:
        folder = tmp_path / name
        rankrl(*QUICK, "task=prune", *small, f"hydra.run.dir={folder}", *arguments)
        return folder

    return task


def test_it_writes_the_run_folder_of_the_pipeline(prune: Callable[..., Path]) -> None:
    folder = prune("run", "pruner=group_lasso", *MASKS, "budget.macs=0.6", "finetune.epochs=2")
    for name in ("plan.json", "metrics.json", "model.safetensors", "model.onnx", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    assert {path.name for path in (folder / "plots").iterdir()} >= {"layers.png"}
    metrics = read_json(folder / "metrics.json")
    assert (metrics["task"], metrics["pruner"]) == ("prune", "group_lasso")
    assert metrics["decomposition"] is metrics["selector"] is None
    assert metrics["compressed"]["macs"] <= 0.6 * metrics["baseline"]["macs"]
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert metrics["onnx"]["accuracy"] == pytest.approx(metrics["finetuned"]["accuracy"], abs=0.01)
    assert set(metrics["ratios"]) == {"params", "macs", "bytes", "file_bytes", "latency", "activation_bytes"}
    pruning = metrics["pruning"]
    assert (pruning["measure"], pruning["target"]) == ("macs", 0.6)
    assert pruning["channels_kept"] < pruning["channels"]
    assert len(pruning["mask_epochs"]) == 3
    assert set(pruning["jump"]) == {"sampled", "deterministic", "fixed"}
    assert metrics["epochs"][0]["lr"] > 1e-4
    plan = CompressionPlan.load(folder / "plan.json")
    kept = kept_channels(plan)
    page = (folder / "report.html").read_text()
    assert "group lasso" in page
    assert "Channels kept" in page
    for name, channels in kept.items():
        assert f"{len(channels)} of " in page, name


@pytest.mark.slow
def test_prune_then_decompose_is_one_plan_whose_network_goes_on(
    prune: Callable[..., Path], rankrl: Command, small: tuple[str, ...], tmp_path: Path
) -> None:
    folder = prune("run", *PRUNED_THEN_TUCKER)
    metrics = read_json(folder / "metrics.json")
    assert metrics["pruned"]["macs"] <= 0.6 * metrics["baseline"]["macs"]
    assert metrics["compressed"]["params"] <= 0.5 * metrics["pruned"]["params"]
    assert (metrics["decomposition"], metrics["selector"]) == ("tucker", "greedy")
    plan = CompressionPlan.load(folder / "plan.json")
    assert plan.chosen_by == "magnitude, then greedy"
    assert kept_channels(plan)
    assert {each.format for each in plan.chosen(Factorise).values()} == {"tucker"}
    weights = folder / "model.safetensors"
    for task, given in (
        ("apply", f"plan={folder / 'plan.json'}"),
        ("evaluate", f"weights={weights}"),
        ("export", f"weights={weights}"),
        ("finetune", f"weights={weights}"),
    ):
        rankrl(*QUICK, *small, f"task={task}", given, f"hydra.run.dir={tmp_path / task}")
    compressed = [
        read_json(tmp_path / task / "metrics.json")["compressed"] for task in ("apply", "evaluate", "export")
    ]
    assert {row["params"] for row in compressed} == {metrics["compressed"]["params"]}
    assert {row["macs"] for row in compressed} == {metrics["compressed"]["macs"]}
    assert compressed[1]["accuracy"] == compressed[2]["accuracy"] == metrics["finetuned"]["accuracy"]
    assert read_json(tmp_path / "export" / "metrics.json")["onnx"]["max_abs_difference"] <= 1e-4


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize(
    ("between", "stages"),
    [pytest.param(2, {"finetune-pruned": 2, "finetune": 1}, marks=pytest.mark.slow), (0, {"finetune": 1})],
)
def test_epochs_before_the_decomposition_are_counted_apart(
    prune: Callable[..., Path], between: int, stages: dict[str, int]
) -> None:
    epochs = (f"prune.finetune_epochs={between}", "finetune.epochs=1")
    folder = prune("run", *PRUNED_THEN_TUCKER, *epochs, "export.int8=false")
    trainings = read_json(folder / "metrics.json")["trainings"]
    assert {name: trainings[name]["epochs"] for name in trainings if name.startswith("finetune")} == stages


def test_applying_the_plan_gives_what_a_criterion_gave(
    prune: Callable[..., Path], rankrl: Command, small: tuple[str, ...], tmp_path: Path
) -> None:
    folder = prune("run", "pruner=first_k", "budget.params=0.5", "export.int8=false", "finetune.epochs=0")
    rankrl(
        *QUICK, *small, "task=apply", f"plan={folder / 'plan.json'}", f"hydra.run.dir={tmp_path / 'apply'}"
    )
    expected = read_json(folder / "metrics.json")["compressed"]
    assert read_json(tmp_path / "apply" / "metrics.json")["compressed"].items() <= expected.items()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_result(
    prune: Callable[..., Path], rankrl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("pruner=hard_concrete", *MASKS, "budget.macs=0.7")
    whole = prune("whole", *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("rankrl.module_compression.save_compressed", kill)
        with pytest.raises(Killed):
            prune("broken", *arguments)
    broken = whole.parent / "broken"
    assert not (broken / "metrics.json").exists()
    monkeypatch.setattr("rankrl.pruners.prune.train_channel_masks", kill)  # finished stages are not repeated
    rankrl(f"resume={broken}")
    for name in ("plan.json", "model.safetensors"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pruner=lasso",), "choose from apoz"),
        (("pruner.name=lasso",), "Did you mean 'group_lasso'"),
        (("pruner.epoch=3",), "Did you mean 'pruner.epochs'"),
        (("pruner=magnitude", "pruner.scope=everywhere"), "uniform, global"),
    ],
)
def test_what_is_no_option_is_refused_before_the_task(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refusal("task=prune", "model=conv4", *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("budget.params=0.5", "budget.macs=0.5"), "one target"),
        (("budget.macs=1.0",), "outside (0, 1)"),
        (("pruner.epochs=0",), "epochs must be at least 1"),
        (("pruner.layers=[fc2]",), "layer 'fc2' cannot be pruned"),
        (("pruner.layers=[nothing]",), "layer 'nothing' cannot be pruned"),
        (("+pruner.strengths={layer1.0: 1}",), "the channel groups are conv1, conv2"),
        (("prune.decompose_params=0.5", "prune.decompose_macs=0.5"), "not both"),
        (("prune.decompose_macs=2",), "prune.decompose_macs=2.0 is outside (0, 1)"),
        (
            ("prune.decompose_macs=0.5", "prune.finetune_epochs=-1"),
            "prune.finetune_epochs must be at least 0",
        ),
        (
            ("prune.decompose_macs=0.5", "prune.finetune_epochs=1", "finetune.epochs=0", "finetune.warmup=2"),
            "warmup",
        ),
    ],
)
def test_bad_input_is_refused_by_the_task_before_the_network_is_trained(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("rankrl.training.networks.train", None)
    assert expected in task_refusal("task=prune", "model=conv4", *arguments)


def test_bad_input_is_told_in_one_paragraph(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankrl.training.networks.train", None)
    assert "cannot be reached" in refused("task=prune", "model=conv4", "budget.macs=0.0001")


class Shared(nn.Module):
    """A network whose only layer beside the head is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.head = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.same(self.same(x)).flatten(1))


def test_shared_modules_are_named() -> None:
    message = task_refusal("task=prune", "model=custom", f"model._target_={__name__}.Shared")
    assert "'same' is shared: it is called 2 times" in message


@pytest.mark.slow
def test_blocks_are_removed_and_what_is_left_decomposed(rankrl: Command, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    chosen = (*QUICK, "model=resnet20", "pruner=blocks", "budget.macs=0.8")
    rankrl(
        *chosen,
        "task=prune",
        "prune.decompose_params=0.5",
        "decomposition=tucker",
        "selector=greedy",
        f"hydra.run.dir={folder}",
    )
    metrics = read_json(folder / "metrics.json")
    assert metrics["pruning"]["blocks_removed"]
    assert metrics["pruned"]["macs"] <= 0.8 * metrics["baseline"]["macs"]
    assert metrics["compressed"]["params"] <= 0.5 * metrics["pruned"]["params"]
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    rankrl(
        *QUICK,
        "model=resnet20",
        "task=evaluate",
        f"weights={folder / 'model.safetensors'}",
        f"hydra.run.dir={tmp_path / 'evaluate'}",
    )
    found = read_json(tmp_path / "evaluate" / "metrics.json")["compressed"]
    assert found["params"] == metrics["compressed"]["params"]
