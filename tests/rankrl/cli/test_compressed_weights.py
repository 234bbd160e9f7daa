"""What is said of a compressed network is read from its file, never from options' defaults."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import SmallNetwork, read_json, small_network, task_refusal

from decomposition import (
    CompressionPlan,
    LayerPlan,
    Quantise,
    apply_plan,
    count_macs,
    count_parameters,
    make_plan,
    save_compressed,
)
from rankrl.cli.tasks.task_run import method_of
from rankrl.operations import KeepChannels
from rankrl.pruners.prune import THEN
from rankrl.report.run_folder import gather_runs

Command = Callable[..., None]
SHAPE = (1, 8, 8)


def cp_plan(network: SmallNetwork) -> CompressionPlan:
    return make_plan(network, SHAPE, "cp", ranks=6, chosen_by="greedy")


@pytest.fixture
def compressed(tmp_path: Path) -> tuple[str, ...]:
    """Write a dense network and one in CP; return the options that name both."""
    options = small_network(tmp_path)
    torch.manual_seed(0)
    dense = SmallNetwork(10).eval()
    plan = cp_plan(dense)
    save_compressed(apply_plan(dense, plan), plan, tmp_path / "cp" / "model.safetensors")
    return *options, f"weights={tmp_path / 'cp' / 'model.safetensors'}"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "cp").mkdir()


@pytest.mark.parametrize(
    "options",
    [
        ("task=evaluate",),
        ("task=finetune", "finetune.epochs=1", "dataset.train_images=64"),
        ("task=export", "export.runs=2", "export.int8=false"),
    ],
    ids=lambda options: options[0],
)
def test_labels_and_shares_are_those_of_the_file(
    rankrl: Command, compressed: tuple[str, ...], options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    rankrl(*compressed, *options, "hydra.run.dir=runs/one")
    metrics = read_json(Path("runs/one/metrics.json"))
    dense, small = SmallNetwork(10), metrics["compressed"]
    assert (metrics["decomposition"], metrics["selector"]) == ("cp", "greedy")
    assert metrics["baseline"]["params"] == count_parameters(dense)
    assert metrics["baseline"]["macs"] == count_macs(dense, SHAPE)
    assert metrics["ratios"]["params"] == pytest.approx(count_parameters(dense) / small["params"])
    share = f"needs {100 * small['params'] / count_parameters(dense):.1f}"
    assert share in capfd.readouterr().out
    page = Path("runs/one/report.html").read_text()
    assert "bayes" not in page
    assert "tensor ring" not in page
    (run,) = gather_runs("runs")
    assert (run.method, run.named("selector")) == ("cp", "greedy")


def test_without_the_dense_weights_only_costs_are_compared(
    rankrl: Command, compressed: tuple[str, ...]
) -> None:
    rankrl(*(each for each in compressed if "checkpoint" not in each), "task=evaluate", "hydra.run.dir=one")
    metrics = read_json(Path("one/metrics.json"))
    assert set(metrics["baseline"]) == {"params", "macs"}
    assert metrics["ratios"]["macs"] > 1


def test_the_dense_network_is_labelled_with_no_method(rankrl: Command, tmp_path: Path) -> None:
    rankrl(*small_network(tmp_path), "task=evaluate", "hydra.run.dir=runs/one")
    metrics = read_json(Path("runs/one/metrics.json"))
    assert metrics["decomposition"] is metrics["selector"] is None
    assert gather_runs("runs")[0].method == ""


def test_an_applied_plan_keeps_its_names(rankrl: Command, tmp_path: Path) -> None:
    cp_plan(SmallNetwork(10).eval()).save(tmp_path / "plan.json")
    options = (
        *small_network(tmp_path),
        "task=apply",
        "calibration.images=32",
        f"plan={tmp_path / 'plan.json'}",
    )
    rankrl(*options, "hydra.run.dir=one")
    metrics = read_json(Path("one/metrics.json"))
    assert (metrics["decomposition"], metrics["selector"]) == ("cp", "greedy")


def plan_of(*operations: Any, chosen_by: str) -> CompressionPlan:
    layers = tuple(LayerPlan(f"layer{index}", each) for index, each in enumerate(operations))
    return CompressionPlan(layers, "0", SHAPE, chosen_by)


def test_a_plan_names_its_formats_and_who_chose() -> None:
    cp, tucker = (
        make_plan(SmallNetwork(10).eval(), SHAPE, name, ranks=4)["conv2"].operations
        for name in ("cp", "tucker")
    )
    rounded, channels = (Quantise(),), (KeepChannels((0, 2)),)

    def method(*operations: Any, chosen_by: str) -> dict[str, str | None]:
        return method_of(plan_of(*operations, chosen_by=chosen_by))

    assert method(cp, (), chosen_by="user") == {"decomposition": "cp", "selector": "user"}
    assert method(cp, tucker, chosen_by="bayes")["decomposition"] == "auto"
    assert method(rounded, chosen_by="bayes") == {"decomposition": None, "selector": "bayes"}
    removed = method(channels, chosen_by="group_lasso")
    assert removed == {"decomposition": None, "selector": None, "pruner": "group_lasso"}
    both = method((*channels, *cp), chosen_by=f"random{THEN}greedy")
    assert both == {"decomposition": "cp", "selector": "greedy", "pruner": "random"}
    assert method((*channels, *cp), chosen_by="local") == {"decomposition": "cp", "selector": "local"}


@pytest.mark.parametrize("named", ["run={}", "weights={}/model.safetensors"])
def test_the_network_and_the_data_of_a_run_need_not_be_given_again(
    rankrl: Command, whole_run: Path, capfd: pytest.CaptureFixture[str], named: str
) -> None:
    rankrl("task=evaluate", named.format(whole_run), "hydra.run.dir=one")
    metrics, before = read_json(Path("one/metrics.json")), read_json(whole_run / "metrics.json")
    assert (metrics["model"], metrics["dataset"]) == (before["model"], before["dataset"])
    assert metrics["compressed"]["accuracy"] == pytest.approx(before["finetuned"]["accuracy"])
    assert metrics["baseline"].items() <= before["baseline"].items()
    weights = f" weights='{whole_run / 'model.safetensors'}'" if named.startswith("run") else ""
    dense = whole_run / "dense.safetensors"
    said = f"rankrl: model=conv4 model.checkpoint='{dense}' dataset=digits{weights}, as in"
    assert said in capfd.readouterr().out


def test_a_finished_fine_tuning_goes_on(
    rankrl: Command, whole_run: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    options = ("task=finetune", f"run={whole_run}")
    rankrl(*options, "finetune.epochs=2", "hydra.run.dir=longer")
    longer, before = read_json(Path("longer/metrics.json")), read_json(whole_run / "metrics.json")
    assert longer["epochs"][:-1] == before["epochs"]
    assert len(longer["epochs"]) == 2
    assert longer["compressed"]["accuracy"] == pytest.approx(before["finetuned"]["accuracy"])
    assert "has 1 epochs already; give more of them than 1" in refused(*options, "finetune.epochs=1")
    message = refused(*options, "finetune.epochs=2", "optim.lr=0.5")
    assert "lr was 0.0001, is now 0.5" in message
    assert f"A new one begins with weights={whole_run / 'model.safetensors'}" in message


def test_weights_of_no_run_name_the_options_that_are_missing(
    compressed: tuple[str, ...], tmp_path: Path
) -> None:
    message = task_refusal("task=evaluate", compressed[-1])
    assert "does not fit model=resnet20 for dataset=digits" in message
    assert "Give the options model and dataset that its run had" in message
    dense = f"weights={tmp_path / 'small.safetensors'}"
    assert "a dense network is model.checkpoint=" in task_refusal("task=evaluate", dense)


def test_a_plan_of_another_network_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def begun(*_: object, **__: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr("rankrl.module_compression.run_training", begun)
    plan = cp_plan(SmallNetwork(10).eval())
    plan.save(tmp_path / "plan.json")
    given = ("task=apply", f"plan={tmp_path / 'plan.json'}")
    assert "plan.json does not fit model=conv4 for dataset=digits" in task_refusal(*given, "model=conv4")
    layers = tuple(
        replace(each, operations=tuple(replace(o, ranks=(6, 6)) for o in each.operations)) for each in plan
    )
    replace(plan, layers=layers).save(tmp_path / "plan.json")
    small = ("model=custom", "model._target_=command_line.SmallNetwork")
    assert "layer 'conv2': cp takes one rank, got [6, 6]" in task_refusal(*given, *small)
