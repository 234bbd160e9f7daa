"""The operations that come from `pruning`, registered for plans by importing this package."""

from __future__ import annotations

from rankrl.operations.keep_channels import KeepChannels, kept_channels
from rankrl.operations.remove_block import RemoveBlock, removed_blocks

__all__ = ["KeepChannels", "RemoveBlock", "kept_channels", "removed_blocks"]
