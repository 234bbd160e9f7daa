"""What runs that begin with the same dense network share, and what a run without a file leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import SmallNetwork, read_json, small_network

from rankrl.networks import module as image_module
from rankrl.verify import measure

Command = Callable[..., None]
OPTIONS = (
    *("dataset=digits", "selector=greedy", "decomposition=tucker", "budget.params=0.6", "finetune.epochs=0"),
    *("calibration.images=64", "decomposition.candidates=3", "export.runs=2", "export.batch=8"),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the dense network is exported, quantised and tested."""
    counted: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        own = getattr(module, name)

        def counting(*args: Any, **options: Any) -> Any:
            counted[name] += 1
            return own(*args, **options)

        monkeypatch.setattr(module, name, counting)

    for name in ("export_onnx", "quantise_onnx", "correct_tests"):
        count(measure, name)
    monkeypatch.setattr(image_module, "correct_tests", measure.correct_tests)  # which it imports by name
    return counted


def test_runs_with_one_dense_network_export_and_test_it_once(
    rankrl: Command, staged: None, calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = small_network(tmp_path)
    for name, rank in enumerate((8, 4)):
        rankrl(*network, *OPTIONS, f"decomposition.rank_multiple={rank}", f"hydra.run.dir={name}")
    compressed = 2 * 2  # before and after fine-tuning
    assert calls == {"export_onnx": 1, "quantise_onnx": 1, "correct_tests": 1 + compressed}
    first, second = (read_json(Path(f"{name}/metrics.json")) for name in (0, 1))
    assert first["baseline"] == second["baseline"]
    for name in ("accuracy", "file_bytes"):
        assert first["dense_int8"][name] == second["dense_int8"][name]
    assert Path("0/state/dense.onnx").read_bytes() == Path("1/state/dense.onnx").read_bytes()
    assert "export of the dense network: " in Path("1/rankrl.log").read_text()

    own = SmallNetwork.forward  # the same weights, another computation
    monkeypatch.setattr(SmallNetwork, "forward", lambda self, x: 2 * own(self, x))
    rankrl(*network, *OPTIONS, "export.int8=false", "hydra.run.dir=2")
    assert calls == {"export_onnx": 2, "quantise_onnx": 1, "correct_tests": 2 + 3 * 2}


def test_a_run_without_export_has_all_but_the_file(
    rankrl: Command, calls: Counter[str], tmp_path: Path
) -> None:
    rankrl(*small_network(tmp_path), *OPTIONS, "export=false", "hydra.run.dir=run")
    metrics = read_json(Path("run/metrics.json"))
    assert not set(metrics) & {"onnx", "runtimes"}
    assert set(metrics["ratios"]) == {"params", "macs"}
    assert metrics["certificate"]
    assert metrics["finetuned"]
    assert Path("run/report.html").exists()
    assert not list(Path("run").rglob("*.onnx"))
    assert calls["export_onnx"] == calls["quantise_onnx"] == 0
