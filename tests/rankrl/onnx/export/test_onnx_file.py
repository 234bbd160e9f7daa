"""What `export_onnx` writes: one checked file that computes what the model computes, and nothing else."""

import copy
import json
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnxruntime import InferenceSession
from torch import Tensor, nn

from rankrl.errors import DefectError, ExportError, RankrlError, StorageError
from rankrl.onnx.export import ExportResult, export_onnx, verify_onnx
from rankrl.onnx.protobuf import write_checked

SHAPE = (3, 8, 8)
Maker = Callable[[str], nn.Module]
Exported = tuple[nn.Module, ExportResult]


@pytest.fixture(scope="module")
def unfolded(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Return one of the small networks by name, and its file with batch normalisations as they are."""

    @cache
    def export(name: str) -> Exported:
        model, path = make(name), tmp_path_factory.mktemp(name) / "model.onnx"
        return model, export_onnx(model, path, SHAPE, fold_batchnorm=False)

    return export


def test_the_file_computes_what_the_model_computes(exported: Exported) -> None:
    model, result = exported
    assert verify_onnx(model, result.path, torch.randn(9, *SHAPE)) <= 1e-4


def test_torch_reads_its_translations_once_and_lists_operators_once_an_export(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    utils = pytest.importorskip("torch._export.utils")
    really, read = registration.ONNXRegistry.__dict__["from_torchlib"], []
    list_operators = Mock(wraps=utils._materialize_cpp_cia_ops)
    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", list_operators)

    def from_torchlib(cls: type, *arguments: int, **options: int) -> object:
        read.append((arguments, options))
        return really.__func__(cls, *arguments, **options)

    monkeypatch.setattr(registration.ONNXRegistry, "from_torchlib", classmethod(from_torchlib))
    monkeypatch.setattr("rankrl.onnx.export.tracing._TRANSLATIONS", {})
    ours = registration.ONNXRegistry.__dict__["from_torchlib"]
    paths = [tmp_path / name for name in ("first.onnx", "second.onnx")]
    model = make("residual")
    for path in paths:
        export_onnx(model, path, SHAPE)
    assert len(read) == 1
    assert list_operators.call_count == len(paths)
    assert utils._materialize_cpp_cia_ops is list_operators
    assert registration.ONNXRegistry.__dict__["from_torchlib"] is ours
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_onnx_reference_evaluator_agrees(exported: Exported) -> None:
    model, result = exported
    images = torch.randn(3, *SHAPE)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(images).numpy()
    got = ReferenceEvaluator(str(result.path)).run(None, {"input": images.numpy()})[0]
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_batch_normalisation_is_folded(exported: Exported) -> None:
    assert "BatchNormalization" not in exported[1].operators


@pytest.mark.parametrize("name", ["residual", "contracted"])
def test_batch_normalisation_stays_when_asked_to(name: str, unfolded: Callable[[str], Exported]) -> None:
    model, result = unfolded(name)
    expected = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert result.operators["BatchNormalization"] == expected
    assert verify_onnx(model, result.path, torch.randn(7, *SHAPE)) <= 1e-4


def test_batch_normalisation_of_a_shared_output_stays_right(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self, conv: nn.Module) -> None:
            super().__init__()
            self.conv, self.bn = conv, nn.BatchNorm2d(48)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.bn(y) + y

    from_cores = make_contracted()
    model = Shared(from_cores)
    nn.init.normal_(model.bn.running_mean)
    result = export_onnx(model, tmp_path / "model.onnx", (32, 8, 8))
    assert result.operators["BatchNormalization"] == 1
    assert verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, 32, 8, 8)) <= 1e-4


def make_contracted() -> nn.Module:
    class Contracted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(48, 3)), nn.Parameter(torch.randn(3, 32 * 9) / 9)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.conv2d(x, (self.left @ self.right).reshape(48, 32, 3, 3), padding=1)

    return Contracted()


def test_cores_stay_cores_so_a_compressed_model_stays_small(written: Callable[[str], Exported]) -> None:
    model, result = written("contracted")
    weights = onnx.load(result.path).graph.initializer
    stored = sum(
        int(np.prod(tensor.dims)) for tensor in weights if tensor.data_type == onnx.TensorProto.FLOAT
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert stored <= parameters
    assert result.file_bytes < 4 * parameters + 8_000
    assert result.file_bytes == result.path.stat().st_size


def test_one_self_contained_file_is_all_that_is_written(exported: Exported) -> None:
    path = exported[1].path
    assert [each.name for each in path.parent.iterdir()] == ["model.onnx"]
    assert not any(t.external_data for t in onnx.load(path, load_external_data=False).graph.initializer)


def test_the_file_holds_no_path_of_a_source_file(exported: Exported) -> None:
    assert b".py" not in exported[1].path.read_bytes()


def test_the_model_is_not_changed(make: Maker, exported: Exported) -> None:
    model, result = exported
    untouched = make(result.path.parent.name.rstrip("0123456789"))
    assert all(module.training for module in model.modules())
    assert list(untouched.state_dict()) == list(model.state_dict())
    for expected, got in zip(untouched.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(expected, got)


def test_nothing_is_printed_and_metadata_is_stored(
    make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = json.dumps({"version": 1, "layers": {"0": {"ranks": [3, 4]}}})
    export_onnx(make("plain"), tmp_path / "model.onnx", SHAPE, metadata={"plan": plan, "metrics": "{}"})
    assert capfd.readouterr() == ("", "")
    stored = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert stored == {"plan": plan, "metrics": "{}"}


def dimensions(graph: onnx.GraphProto) -> dict[str, list[str | int]]:
    return {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output, *graph.value_info)
    }


@pytest.mark.parametrize("folded", [True, False])
def test_the_batch_axis_is_called_batch(
    written: Callable[[str], Exported], unfolded: Callable[[str], Exported], folded: bool
) -> None:
    path = (written if folded else unfolded)("residual")[1].path
    graph = onnx.load(path).graph
    named = dimensions(graph)
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert named["input"] == ["batch", *SHAPE]
    assert named["output"] == ["batch", 5]
    assert {size for axes in named.values() for size in axes if isinstance(size, str)} == {"batch"}
    assert InferenceSession(path).get_inputs()[0].shape == ["batch", *SHAPE]


def test_sizes_that_follow_from_the_batch_are_named_after_it(tmp_path: Path) -> None:
    class Merged(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.flatten(0, 1) + 1, torch.cat([x, x])

    export_onnx(Merged(), tmp_path / "model.onnx", SHAPE)
    named = dimensions(onnx.load(tmp_path / "model.onnx").graph)
    assert named["output_0"][0] == "3*batch"
    assert named["output_1"][0] == "2*batch"
    assert verify_onnx(Merged(), tmp_path / "model.onnx", torch.randn(7, *SHAPE)) == 0


@pytest.mark.parametrize("opset", [18, 21])
def test_the_opset_is_the_one_asked_for(make: Maker, tmp_path: Path, opset: int) -> None:
    model = make("residual")
    assert export_onnx(model, tmp_path / "model.onnx", SHAPE, opset=opset).opset == opset
    assert verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, *SHAPE)) <= 1e-4


def test_a_fixed_batch_is_written_when_asked_for(make: Maker, fixed_file: Path) -> None:
    shape = onnx.load(fixed_file).graph.input[0].type.tensor_type.shape
    assert [dimension.dim_value for dimension in shape.dim] == [4, *SHAPE]
    assert verify_onnx(make("plain"), fixed_file, torch.randn(2, *SHAPE)) <= 1e-4


def test_a_sample_of_one_image_still_gives_a_dynamic_batch(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3)
    export_onnx(model, tmp_path / "model.onnx", SHAPE, sample=torch.randn(1, *SHAPE))
    assert verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, *SHAPE)) <= 1e-4


def test_half_precision_models_are_exported_in_float32(tmp_path: Path) -> None:
    model, sample = nn.Conv2d(3, 4, 3).to(torch.bfloat16), torch.randn(2, *SHAPE).to(torch.bfloat16)
    export_onnx(model, tmp_path / "model.onnx", SHAPE, sample=sample)
    assert verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, *SHAPE)) <= 1e-4
    assert next(model.parameters()).dtype == torch.bfloat16


def test_several_outputs_are_all_compared(tmp_path: Path) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor | list[Tensor]]:
            return {"left": self.left(x), "right": [self.right(x), x]}

    model = TwoHeads()
    export_onnx(model, tmp_path / "model.onnx", (6,))
    assert len(onnx.load(tmp_path / "model.onnx").graph.output) == 3
    assert verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, 6)) <= 1e-5


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class ThroughNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class Untranslatable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svd(x.flatten(1))[0]


@pytest.mark.parametrize("layer", [DataDependent, ThroughNumpy, Untranslatable])
def test_a_layer_that_cannot_be_exported_is_named(
    layer: type[nn.Module], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), layer()))
    with pytest.raises(ExportError, match=rf"layer '1\.1' \({layer.__name__}\)") as caught:
        export_onnx(model, tmp_path / "model.onnx", SHAPE)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_an_input_that_does_not_fit_names_the_layer(make: Maker, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"layer '0' \(Conv2d\).*\(2, 1, 8, 8\).*shape of one real input"):
        export_onnx(make("plain"), tmp_path / "model.onnx", (1, 8, 8))


def test_a_model_that_fixes_its_batch_size_is_refused_with_advice(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(2, -1)

    with pytest.raises(ExportError, match="dynamic_batch=False"):
        export_onnx(Fixed(), tmp_path / "model.onnx", SHAPE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"opset": opset}, "must lie between 18 and") for opset in (0, 17, 1000)),
        *(
            ({"sample": torch.zeros(shape)}, "sample has the shape")
            for shape in ((2, 1, 8, 8), (0, 3, 8, 8), (3, 8, 8))
        ),
        ({"metadata": {"plan": {"a": 1}}}, "strings to strings"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    make: Maker, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export_onnx(make("plain"), tmp_path / "model.onnx", SHAPE, **options)


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.lock = threading.Lock()
    with pytest.raises(ExportError, match="cannot be copied"):
        export_onnx(model, tmp_path / "model.onnx", (3,))


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        export_onnx(nn.ReLU(), tmp_path / "file" / "model.onnx", SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_torchvision_networks_are_exported(name: str, tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    result = export_onnx(model, tmp_path / "model.onnx", (3, 64, 64))
    assert "BatchNormalization" not in result.operators
    assert verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, 3, 64, 64)) <= 1e-4


class Wrapper(nn.Module):
    """Hands on whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs, **named)


@pytest.mark.parametrize(
    ("network", "inputs", "names"),
    [
        (nn.Linear(3, 2), torch.randn(4, 3), ["input"]),
        (nn.Bilinear(3, 5, 2), (torch.randn(4, 3), torch.randn(4, 5)), ["input_0", "input_1"]),
        (
            nn.Bilinear(3, 5, 2),
            {"input1": torch.randn(4, 3), "input2": torch.randn(4, 5)},
            ["input1", "input2"],
        ),
    ],
)
def test_a_forward_of_any_arguments_is_exported_with_a_free_batch(
    network: nn.Module, inputs: Any, names: list[str], tmp_path: Path
) -> None:
    wrapped = Wrapper(network)
    export_onnx(wrapped, tmp_path / "model.onnx", inputs)
    assert [each.name for each in onnx.load(tmp_path / "model.onnx").graph.input] == names
    assert verify_onnx(wrapped, tmp_path / "model.onnx", inputs) < 1e-5


def model_of(*nodes: onnx.NodeProto, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, kind, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph(list(nodes), "graph", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


RIGHT = model_of(helper.make_node("Relu", ["x"], ["y"], "relu"))
UNSORTED = model_of(
    helper.make_node("Neg", ["a"], ["y"], "neg"), helper.make_node("Relu", ["x"], ["a"], "relu")
)
TWICE = model_of(  # onnx's checker minds no names of nodes
    helper.make_node("Relu", ["x"], ["a"], "same"), helper.make_node("Neg", ["a"], ["y"], "same")
)


@pytest.mark.parametrize("damaged", [UNSORTED, TWICE], ids=["unsorted", "twice"])
def test_a_damaged_file_is_a_fault_of_ours_and_leaves_what_was_there(
    damaged: onnx.ModelProto, tmp_path: Path
) -> None:
    target = tmp_path / "net.onnx"
    with pytest.raises(
        DefectError, match=r"the network is damaged, so nothing was written to .*net\.onnx"
    ) as raised:
        write_checked(ir.from_proto(damaged), target, "the network")
    assert not isinstance(raised.value, RankrlError)  # the command line keeps its traceback
    assert "please report" in str(raised.value)
    assert onnx.__version__ in str(raised.value)
    assert not target.exists()
    target.write_bytes(b"what was there")
    with pytest.raises(DefectError):
        write_checked(ir.from_proto(damaged), target, "the network")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("net.onnx", b"what was there")
    ]


def test_a_right_file_is_written_with_its_size(tmp_path: Path) -> None:
    assert write_checked(ir.from_proto(RIGHT), tmp_path / "net.onnx", "it", full_check=True) == len(
        RIGHT.SerializeToString()
    )
    onnxruntime.InferenceSession(tmp_path / "net.onnx")


def test_what_onnxruntime_lacks_a_kernel_for_is_left_to_the_checker(tmp_path: Path) -> None:
    lacking = model_of(helper.make_node("Softplus", ["x"], ["y"], "soft"), kind=TensorProto.DOUBLE)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        onnxruntime.InferenceSession(lacking.SerializeToString())
    write_checked(ir.from_proto(lacking), tmp_path / "net.onnx", "it")
    assert onnx.load(tmp_path / "net.onnx") == lacking
