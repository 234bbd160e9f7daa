"""Register the operations of `pruning` for plans; importing the package suffices."""

from __future__ import annotations

from rankrl.operations.removals import KeepChannels, RemoveBlock, kept_channels, removed_blocks

__all__ = ["KeepChannels", "RemoveBlock", "kept_channels", "removed_blocks"]
