"""Edits of onnx_ir's models, carried out on models in protobuf, which onnx's own tools judge."""

from collections.abc import Callable
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from rankrl.onnx.protobuf import to_proto

_Result = TypeVar("_Result")


def edited(model: onnx.ModelProto, edit: Callable[..., _Result], *options: Any) -> _Result:
    """Edit a model in place and return what the edit does.

    Args:
        model: The model.
        edit: Takes a model of onnx_ir.
        options: What it takes besides.
    """
    changed = ir.from_proto(model)
    result = edit(changed, *options)
    model.CopyFrom(to_proto(changed))
    return result
