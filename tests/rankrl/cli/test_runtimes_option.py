"""`export.runtimes`: the finished files in every runtime that is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import read_json, task_refusal

from rankrl.errors import ExportError
from rankrl.onnx.runtimes import get_runtime
from rankrl.verify import runtimes

Command = Callable[..., None]
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
    original = runtimes.verified

    def differs(*args: Any, runtime: str) -> Any:
        if runtime == "openvino":
            raise ExportError("it differs")
        return original(*args, runtime=runtime)

    monkeypatch.setattr(runtimes, "verified", differs)
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
