"""Files that are damaged never appear, and are called a fault of ours."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from rankrl.errors import DefectError, RankrlError
from rankrl.onnx.export.onnx_file import write_checked


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
