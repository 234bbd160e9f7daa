"""The contracts of selectors and runtimes as tests, for those of your own too; they need pytest.

`class TestMine(SelectorContract): names = ("mine",)` in a test file is all that it takes. Formats and pruners
have theirs in `decomposition.testing` and `pruning.testing`.
"""

from rankrl.testing.runtimes import RuntimeContract
from rankrl.testing.selectors import SelectorContract

__all__ = ["RuntimeContract", "SelectorContract"]
