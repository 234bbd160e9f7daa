"""What holds for every runtime; one that cannot be used here is skipped, with its own words for why."""

import sys
from pathlib import Path

import pytest
from torch import nn

from rankrl.errors import ConfigError
from rankrl.onnx import runtimes
from rankrl.onnx.export import ExportResult
from rankrl.onnx.runtimes import get_runtime, list_runtimes, open_session
from rankrl.testing import RuntimeContract


class TestRuntimes(RuntimeContract):
    """Every registered runtime keeps the contract, on every network."""

    names = list_runtimes()

    @pytest.fixture
    def exported(self, exported: tuple[nn.Module, ExportResult]) -> tuple[nn.Module, Path]:
        model, written = exported
        return model, written.path


def test_unknown_runtimes_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no runtime 'openvin'.* Did you mean 'openvino'"):
        get_runtime("openvin")


def test_a_runtime_that_is_not_installed_says_what_to_install(
    plain_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(
        ConfigError, match=r"'openvino' cannot be used here: .*pip install 'rankrl\[openvino\]'"
    ):
        open_session(plain_file, runtime="openvino")


@pytest.mark.parametrize(
    ("built", "starts", "said"),
    [(False, False, "pip install onnxruntime-gpu"), (True, False, "finds no GPU"), (True, True, None)],
)
def test_onnxruntime_without_cuda_says_what_is_missing(
    built: bool, starts: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = ["CPUExecutionProvider", *(["CUDAExecutionProvider"] if built else [])]
    monkeypatch.setattr(runtimes.onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(runtimes, "_starts", lambda: starts)
    obstacle = get_runtime("onnxruntime_cuda").obstacle()
    assert obstacle is None if said is None else said in str(obstacle)
