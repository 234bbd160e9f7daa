"""Test the contracts of formats, selectors and runtimes, also of your own ones, with pytest.

Write `class TestMine(SelectorContract): names = ("mine",)` in a test file. The contract of pruners is in
`pruning.testing`, that of formats without ONNX files in `decomposition.testing`.
"""

from rankrl.testing.formats import FormatContract
from rankrl.testing.runtimes import RuntimeContract
from rankrl.testing.selectors import SelectorContract

__all__ = ["FormatContract", "RuntimeContract", "SelectorContract"]
