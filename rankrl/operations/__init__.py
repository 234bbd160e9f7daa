"""The operations that come from `pruning`, registered for plans by importing this package."""

from __future__ import annotations

from rankrl.operations.keep_channels import KeepChannels, kept_channels

__all__ = ["KeepChannels", "kept_channels"]
