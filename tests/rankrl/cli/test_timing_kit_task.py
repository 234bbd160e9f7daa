"""`task=timing_kit` and `timing.table=`: a kit's table in place of this machine."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import QUICK, small_network
from small_graphs import convolutions, images

KIT = ("decomposition=auto", "decomposition.formats=[tucker,cp]", "export.batch=4")
SMALL = tuple(each for each in QUICK if not each.startswith(("model=", "train.")))


def test_a_table_without_a_budget_in_time_is_refused(refused: Callable[..., str]) -> None:
    assert "timing.table=times.json has no effect" in refused("timing.table=times.json", "budget.params=0.5")


def test_a_table_that_is_not_there_is_refused(refused: Callable[..., str]) -> None:
    message = refused("timing.table=none.json", "budget.latency=0.5")
    assert "timing.table cannot be read: there is no file none.json" in message


def test_finished_runs_are_needed(refused: Callable[..., str]) -> None:
    net = ("model=onnx", "model.path=net.onnx", "dataset=inputs", "dataset.path=inputs.npy")
    onnx.save(convolutions(), "net.onnx")
    np.save("inputs.npy", images())
    assert "give runs=FOLDER with" in refused("task=verify_kit", *net)


def test_a_kit_holds_the_finished_networks_and_what_they_were_made_from(rankrl: Callable[..., None]) -> None:
    onnx.save(convolutions(), "net.onnx")
    np.save("inputs.npy", images())
    finished = Path("sweep/half")
    finished.mkdir(parents=True)
    onnx.save(convolutions(), finished / "model.onnx")
    (finished / "metrics.json").write_text('{"baseline": {"score": 1.0}, "compressed": {"score": 0.97}}')
    net = ("model=onnx", "model.path=net.onnx", "dataset=inputs", "dataset.path=inputs.npy")
    rankrl("task=verify_kit", *net, "runs=sweep", "export.batch=2", "hydra.run.dir=out")
    kit = json.loads(Path("out/kit/kit.json").read_text())
    assert [(each["title"], each["score"]) for each in kit["networks"]] == [
        ("original", 1.0),
        ("original in int8", None),
        ("half", 0.97),
    ]
    assert kit["about"] == {"batch": "2"}


@pytest.mark.slow
def test_a_search_for_a_device_goes_by_its_table(rankrl: Callable[..., None], tmp_path: Path) -> None:
    network = small_network(tmp_path)
    rankrl(*network, *SMALL, *KIT, "task=timing_kit", "hydra.run.dir=first")
    kit = json.loads(Path("first/kit/kit.json").read_text())
    files = [name for group in kit["groups"] for name in group["files"]]
    sizes = {name: Path(f"first/kit/models/{name}.onnx.gz").stat().st_size for name in files}
    times = {name: dict.fromkeys(("median_ms", "minimum_ms"), size / 1e3) for name, size in sizes.items()}
    machine = {"processor": "a device", "runtime": "a", "version": "1", "threads": 1, "clock": "wall"}
    head = {"version": kit["version"], "about": kit["about"], "machine": machine}
    table = tmp_path / "times.json"
    table.write_text(json.dumps({**head, "left": 0, "times": times, "failed": {}}))
    options = ("task=search", "budget.latency=0.95", f"timing.table={table}", "hydra.run.dir=second")
    rankrl(*network, *SMALL, *KIT, *options)
    estimate = json.loads(Path("second/metrics.json").read_text())["search"]["estimate"]
    assert estimate["share"] <= 0.95
    assert "a device" in estimate["conditions"]
