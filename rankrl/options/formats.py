"""The tensor formats that can be chosen."""

from __future__ import annotations

FORMATS = {
    "cp": False,
    "pifa": False,
    "spatial_svd": False,
    "tensor_ring": True,
    "tensor_train": True,
    "tucker": False,
}
"""The formats by name; whether they can split channel counts."""
