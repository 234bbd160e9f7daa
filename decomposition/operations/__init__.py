"""Define the operations of a plan on layers, as small registered records.

`operation` holds the base classes and the registry, every other module one operation. Other packages register
their own.
"""

from __future__ import annotations

from decomposition.operations.factorise import ChannelFactors, Factorise
from decomposition.operations.operation import (
    ApplyOptions,
    BatchNormCorrection,
    Cost,
    FittedLayer,
    GroupOperation,
    LayerOperation,
    Operation,
    dense_cost,
    list_operations,
    operation_from_dict,
    operation_kind,
    register_operation,
)
from decomposition.operations.quantise import Quantise

__all__ = [
    "ApplyOptions",
    "BatchNormCorrection",
    "ChannelFactors",
    "Cost",
    "Factorise",
    "FittedLayer",
    "GroupOperation",
    "LayerOperation",
    "Operation",
    "Quantise",
    "dense_cost",
    "list_operations",
    "operation_from_dict",
    "operation_kind",
    "register_operation",
]
