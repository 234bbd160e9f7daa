"""The operations that come from `pruning`, registered for plans by importing this package."""

from __future__ import annotations

from rankrl.operations.removals import KeepChannels, RemoveBlock, kept_channels, removed_blocks

__all__ = ["KeepChannels", "RemoveBlock", "kept_channels", "removed_blocks"]
