"""Test the contracts of selectors and runtimes, also of your own ones, with pytest.

Write `class TestMine(SelectorContract): names = ("mine",)` in a test file. The contracts of formats and
pruners are in `decomposition.testing` and `pruning.testing`.
"""

from rankrl.testing.runtimes import RuntimeContract
from rankrl.testing.selectors import SelectorContract

__all__ = ["RuntimeContract", "SelectorContract"]
