"""A kit is measured by programs that know nothing of rankrl, and its table stands in for this machine."""

import ast
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from small_graphs import convolutions, images
from torch import nn

import rankrl
from decomposition import CompressionPlan, list_formats
from decomposition.choose.listing import CandidateLister
from decomposition.network.layers import is_decomposable_module
from rankrl import DecompositionOptions, LatencyOptions
from rankrl.errors import ConfigError
from rankrl.kits.kit import FileGroup, FinishedFile, KitWriter, TimesFile, packed, write_verify_kit
from rankrl.timing.latency import LocalStopwatch
from rankrl.timing.layer_latency import LayerTimer
from rankrl.timing.network_timer import NetworkTimer

LAYERS = DecompositionOptions(format="auto", formats=("tucker", "cp"), candidates=2, iterations=2)
TIMING: dict[str, Any] = {"batch": 2, "runs": 3}
ASSETS = resources.files("rankrl.kits") / "assets"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    ).eval()


def inputs() -> torch.Tensor:
    return torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def measured(kit: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the kit's program as a bare device would: rankrl cannot be imported."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "measure.py", *arguments]
    return subprocess.run(command, cwd=kit, env=bare, capture_output=True, text=True, check=False)


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def by_weights(kit: Path, content: dict[str, Any]) -> None:
    """Give a file a microsecond for each weight, and a third of one for each integer."""
    for name in content["times"]:
        weights = unpacked(kit / f"models/{name}.onnx.gz").graph.initializer
        sizes = [
            np.prod(each.dims) / (3 if each.data_type == onnx.TensorProto.INT8 else 1) for each in weights
        ]
        content["times"][name] = dict.fromkeys(("median_ms", "minimum_ms"), 0.01 + 1e-3 * float(sum(sizes)))


@pytest.fixture(scope="module")
def whole(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A measured kit, to be read by all tests."""

    def fill(folder: Path) -> None:
        kit = folder / "kit"
        rankrl.timing_kit(network(), inputs(), kit, decomposition=LAYERS, timing=LatencyOptions(**TIMING))
        done = measured(kit)
        assert done.returncode == 0, done.stderr
        edited(kit / "times.json", lambda content: by_weights(kit, content))

    return made_once("timing_kit", fill) / "kit"


@pytest.fixture
def kit(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "kit"))


def searched(table: Path, target: Path, **options: Any) -> rankrl.Compression:
    how: dict[str, Any] = {"latency": 0.8, "decomposition": LAYERS, **options}
    how.setdefault("timing", LatencyOptions(**TIMING, table=table))
    return rankrl.compress(network(), inputs(), target, **how)


def test_a_table_from_elsewhere_answers_in_place_of_this_machine(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a search for another device times nothing here")

    monkeypatch.setattr(LocalStopwatch, "times", refuse)
    monkeypatch.setattr(NetworkTimer, "whole", refuse)
    result = searched(whole / "times.json", tmp_path / "run")
    assert result.search is not None
    estimate = result.search.estimate
    assert estimate is not None
    assert estimate.share <= 0.8
    assert "batch 2, threads 1" in estimate.conditions
    assert result.missed is None, "the time of the file here is no budget's"
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert metrics["search"]["estimate"]["share"] == estimate.share
    plans = metrics["search"]["measured"]
    assert {plan["measure"] for plan in plans} == {"estimated_latency"}
    page = (tmp_path / "run/report.html").read_text()
    assert "The plan is for another device" in page
    assert "estimated from its layers" in page


def test_the_plan_follows_the_times_of_the_device(kit: Path, tmp_path: Path) -> None:
    """Where integers take a hundred times as long, no layer computes in them; dense layers are as slow."""
    integers = [
        path.name.partition(".")[0]
        for path in (kit / "models").iterdir()
        if any("QuantizeLinear" in node.op_type for node in unpacked(path).graph.node)
    ]
    assert integers

    def slow(content: dict[str, Any]) -> None:
        for name in integers:
            content["times"][name] = {key: 100 * ms for key, ms in content["times"][name].items()}

    table = edited(kit / "times.json", slow)
    result = searched(table, tmp_path / "run")
    assert not any("quantise" in operation.kind for layer in result.plan for operation in layer.operations)


def test_a_file_that_does_not_run_is_recorded_and_left_out(kit: Path, tmp_path: Path) -> None:
    (kit / "times.json").unlink()
    broken = [
        path
        for path in (kit / "models").iterdir()
        if any("QuantizeLinear" in node.op_type for node in unpacked(path).graph.node)
    ]
    for path in broken:
        path.write_bytes(gzip.compress(b"no model"))
    done = measured(kit)
    assert done.returncode == 0, done.stderr
    edited(kit / "times.json", lambda content: by_weights(kit, content))
    assert f"{len(broken)} of them do not run here" in done.stdout
    failed = json.loads((kit / "times.json").read_text())["failed"]
    assert len(failed) == len(broken)
    assert all(failed.values()), "a reason for each"
    result = searched(kit / "times.json", tmp_path / "run")
    assert not any("quantise" in operation.kind for layer in result.plan for operation in layer.operations)


def test_a_dense_network_that_does_not_run_leaves_nothing_to_compare_with(kit: Path, tmp_path: Path) -> None:
    networks = json.loads((kit / "kit.json").read_text())["networks"]

    def fail(content: dict[str, Any]) -> None:
        del content["times"][networks[0]["file"]]
        content["failed"][networks[0]["file"]] = "no memory"

    assert networks[0]["title"] == "dense"
    table = edited(kit / "times.json", fail)
    with pytest.raises(Exception, match="the dense network does not run where it was timed"):
        searched(table, tmp_path / "run")


def test_an_interrupted_measurement_goes_on_where_it_stopped(kit: Path, tmp_path: Path) -> None:
    groups = json.loads((kit / "kit.json").read_text())["groups"]
    whole = json.loads((kit / "times.json").read_text())

    def interrupted(content: dict[str, Any]) -> None:
        for name in groups[-1]["files"]:
            del content["times"][name]
        content["left"] = len(groups[-1]["files"])

    edited(kit / "times.json", interrupted)
    with pytest.raises(ConfigError, match=r"lacks \d+ of the kit's files: the measurement was interrupted"):
        searched(kit / "times.json", tmp_path / "run")
    done = measured(kit)
    assert done.returncode == 0, done.stderr
    again = json.loads((kit / "times.json").read_text())
    kept = set(whole["times"]) - set(groups[-1]["files"])
    assert again["left"] == 0
    assert {name: again["times"][name] for name in kept} == {name: whole["times"][name] for name in kept}
    assert set(again["times"]) == set(whole["times"])


def test_a_killed_measurement_is_taken_up_and_two_at_once_are_refused(kit: Path) -> None:
    table = kit / "times.json"
    table.unlink()
    edited(kit / "kit.json", lambda content: [group.update(runs=60) for group in content["groups"]])
    with subprocess.Popen([sys.executable, "-P", "measure.py"], cwd=kit, stdout=subprocess.DEVNULL) as first:
        try:
            while not table.exists():
                time.sleep(0.002)
            first.send_signal(signal.SIGSTOP)
            second = measured(kit)
            assert second.returncode != 0
            assert "is written by another measurement" in second.stderr
        finally:
            first.kill()
    before = json.loads(table.read_text())
    assert before["left"] > 0
    (hole, _), *kept = before["times"].items()
    edited(table, lambda content: content["times"].pop(hole))
    edited(kit / "kit.json", lambda content: [group.update(runs=1) for group in content["groups"]])
    done = measured(kit)
    assert done.returncode == 0, done.stderr
    after = json.loads(table.read_text())
    assert after["left"] == 0
    assert hole in after["times"]
    groups = json.loads((kit / "kit.json").read_text())["groups"]
    beside = next(group["files"] for group in groups if hole in group["files"])
    assert all(after["times"][name] == times for name, times in kept if name not in beside)


def test_a_table_of_another_device_is_not_gone_on_with(kit: Path) -> None:
    done = measured(kit, "--threads", "2")
    assert done.returncode != 0
    assert "was begun with another machine" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=99), "is of version 99, this rankrl reads 2"),
        (lambda content: content.pop("machine"), "is no table of a timing kit"),
        (lambda content: _first(content).update(median_ms=-1.0, minimum_ms=-1.0), "is -1.0; it must be"),
        (lambda content: _first(content).update(median_ms=None, minimum_ms=None), "is None; it must be"),
        (lambda content: content["times"].popitem(), "lacks the file"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_name(
    kit: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    table = edited(kit / "times.json", change)
    with pytest.raises(ConfigError, match=message):
        searched(table, tmp_path / "run")


def _first(content: dict[str, Any]) -> dict[str, float]:
    return next(iter(content["times"].values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decomposition": DecompositionOptions(format="tucker", iterations=2)}, "is of other candidates"),
        ({"timing": {**TIMING, "batch": 3}}, "is of another batch"),
        (
            {"timing": {**TIMING, "threads": 2}},
            "was measured with threads=1, this search has export.threads=2",
        ),
    ],
)
def test_a_table_of_something_else_is_refused_by_name(
    whole: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    if "timing" in options:
        options = {"timing": LatencyOptions(**options["timing"], table=whole / "times.json")}
    with pytest.raises(ConfigError, match=message):
        searched(whole / "times.json", tmp_path / "run", **options)


def test_a_table_of_another_network_is_refused(whole: Path, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(576, 4)).eval()
    timing = LatencyOptions(**TIMING, table=whole / "times.json")
    with pytest.raises(ConfigError, match="is of another network"):
        rankrl.compress(other, inputs(), tmp_path / "run", latency=0.8, decomposition=LAYERS, timing=timing)


def test_a_network_in_a_file_takes_the_same_road(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(convolutions(), path)
    timing = LatencyOptions(**TIMING)
    rankrl.timing_kit(path, images(), tmp_path / "kit", decomposition=LAYERS, timing=timing)
    done = measured(tmp_path / "kit")
    assert done.returncode == 0, done.stderr
    edited(tmp_path / "kit/times.json", lambda content: by_weights(tmp_path / "kit", content))
    timing = LatencyOptions(**TIMING, table=tmp_path / "kit/times.json")
    result = rankrl.compress(
        path, images(), tmp_path / "small.onnx", latency=0.9, decomposition=LAYERS, timing=timing
    )
    assert result.search is not None
    assert result.search.estimate is not None


def test_files_of_one_name_are_alike(tmp_path: Path) -> None:
    """A name stands for the structure of a file, in every format and precision."""
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    )
    structures: dict[str, set[bytes]] = {}

    class Collecting:
        def times(self, group: FileGroup) -> np.ndarray:
            models, _ = group.contents()
            for name, each in zip(group.names, models, strict=True):
                structures.setdefault(name, set()).add(structure(gzip.decompress(packed(each))))
            return np.ones(len(group.names))

    formats = [name for name in list_formats() if name != "tensor_ring"]  # traced, which takes long
    lister = CandidateLister.of_network(model, (8, 8, 8), formats, precisions=("float32", "int8"))
    timer = LayerTimer(batch=2, threads=1, runs=2, stopwatch=Collecting())
    modules = dict(model.named_modules())
    for name, spec in lister.specs.items():
        module = modules[name]
        assert is_decomposable_module(module)
        candidates = lister.candidates(name, limit=2).candidates
        timer.candidates(module, spec, [candidate.operations for candidate in candidates])
        timer.border(spec)
    assert all(len(alike) == 1 for alike in structures.values())
    assert len(structures) > 30


def structure(content: bytes) -> bytes:
    """Return a file without its weights and what things are called in it."""
    model = onnx.load_from_string(content)
    names: dict[str, str] = {}

    def called(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}")

    for entry in model.graph.input:
        entry.name = called(entry.name)
    for node in model.graph.node:
        node.name = ""
        node.input[:] = [called(name) for name in node.input]
        node.output[:] = [called(name) for name in node.output]
    for entry in model.graph.output:
        entry.name = called(entry.name)
    tensors = sorted(model.graph.initializer, key=lambda tensor: called(tensor.name))
    for tensor in tensors:
        tensor.name = called(tensor.name)
        for field in ("raw_data", "float_data", "int32_data", "int64_data"):
            tensor.ClearField(field)
    model.graph.ClearField("initializer")
    model.graph.initializer.extend(tensors)
    model.graph.ClearField("value_info")
    return model.SerializeToString(deterministic=True)


def unpacked(path: Path) -> onnx.ModelProto:
    return onnx.load_from_string(gzip.decompress(path.read_bytes()))


def test_files_hold_no_weights_that_anyone_could_use_and_next_to_no_bytes() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Conv", ["x", "w"], ["y"])],
        "layer",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 64, 8, 8])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    content = packed(ir.from_proto(onnx.helper.make_model(graph)))
    stored = onnx.numpy_helper.to_array(onnx.load_from_string(gzip.decompress(content)).graph.initializer[0])
    assert stored.shape == weight.shape
    assert len(np.unique(stored)) < 1100
    assert stored.std() == pytest.approx(weight.std(), rel=0.1)
    assert len(content) < weight.nbytes / 20


def test_the_programs_need_python_3_9_numpy_and_onnxruntime_alone() -> None:
    tree = ast.parse((ASSETS / "measure.py").read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]  # type: ignore[union-attr]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
def test_the_page_and_the_program_for_node_are_javascript(tmp_path: Path) -> None:
    for name in ("measure.mjs", "kit.mjs"):
        path = tmp_path / name
        path.write_bytes((ASSETS / name).read_bytes())
        subprocess.run(["node", "--check", path], check=True)


def test_finished_networks_are_compared_with_the_first(tmp_path: Path) -> None:
    model = convolutions()
    onnx.save(model, tmp_path / "dense.onnx")
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 1.01, tensor.name))
    onnx.save(model, tmp_path / "small.onnx")
    files = [
        FinishedFile("dense", tmp_path / "dense.onnx", 0.92),
        FinishedFile("small", tmp_path / "small.onnx", None),
    ]
    kit = write_verify_kit(files, images()[:2], tmp_path / "kit", LatencyOptions(**TIMING))
    assert kit.files == 2
    done = measured(kit.folder)
    assert done.returncode == 0, done.stderr
    assert "dense: 0.9200, " in done.stdout
    assert "1.000, 0" in done.stdout
    times = json.loads((kit.folder / "times.json").read_text())["times"]
    differences = [each["difference"] for each in times.values()]
    outputs = [onnxruntime.InferenceSession(each.path).run(None, {"x": images()[:2]})[0] for each in files]
    assert differences == pytest.approx([0.0, np.abs(outputs[0] - outputs[1]).max()], rel=1e-6)


def test_finished_networks_that_were_measured_there_correct_the_estimate(kit: Path, tmp_path: Path) -> None:
    first = searched(kit / "times.json", tmp_path / "first").search
    assert first is not None
    assert first.estimate is not None
    table = json.loads((kit / "times.json").read_text())
    share = 1.25 * float(first.estimate.share)
    times = {name: {"median_ms": ms, "minimum_ms": ms} for name, ms in {"a": 10.0, "b": 10 * share}.items()}
    networks = [
        {"file": "a", "title": "dense", "score": 0.92, "plan": None},
        {"file": "b", "title": "first", "score": 0.91, "plan": first.plan.to_json()},
    ]
    content = {**table, "about": {"batch": "2"}, "times": times, "failed": {}, "networks": networks}
    finished = kit / "verify.json"
    finished.write_text(json.dumps(content))
    tables = [kit / "times.json", finished]
    again = searched(
        kit / "times.json",
        tmp_path / "again",
        latency=min(1.0, 1.1 * share),
        timing=LatencyOptions(**TIMING, table=tables),
    )
    assert again.search is not None
    estimate = again.search.estimate
    assert estimate is not None
    assert [(each["title"], each["score"], each["share"]) for each in estimate.networks] == [
        ("dense", 0.92, 1.0),
        ("first", 0.91, pytest.approx(share)),
    ]
    page = (tmp_path / "again/report.html").read_text()
    assert "corrected by 2 finished networks measured there" in page
    assert "On the other device" in page
    same = [each.operations for each in again.plan] == [each.operations for each in first.plan]
    assert estimate.networks[1]["taken"] == same
    for change, message in (
        ({"machine": {**table["machine"], "processor": "another"}}, "was measured with processor=another"),
        ({"about": {"batch": "3"}}, "is of another batch"),
        (
            {"networks": [networks[0], {**networks[1], "plan": other_plan(first.plan)}]},
            "made from another network",
        ),
    ):
        finished.write_text(json.dumps({**content, **change}))
        with pytest.raises(ConfigError, match=message):
            searched(finished, tmp_path / "refused", timing=LatencyOptions(**TIMING, table=tables))


def other_plan(plan: CompressionPlan) -> str:
    return replace(plan, fingerprint="0").to_json()


def test_each_file_is_written_once(tmp_path: Path) -> None:
    written: list[int] = []

    def contents() -> tuple[Sequence[Any], Any]:
        written.append(1)
        return [], np.zeros(1)

    kit = KitWriter(tmp_path, {}, threads=1)
    kit._names.add("known")
    assert kit.times(FileGroup(("known",), contents, 3)).tolist() == [1.0]
    assert not written


def test_of_a_busy_device_s_wall_time_the_minimum_counts(kit: Path) -> None:
    def on_the_wall(content: dict[str, Any]) -> None:
        content["machine"]["clock"] = "wall"

    known = json.loads((kit / "times.json").read_text())["times"]
    table = TimesFile.load(edited(kit / "times.json", on_the_wall))
    assert table.known == {name: each["minimum_ms"] for name, each in known.items()}
