"""Make trained convolutional networks small and fast: reinforcement learning chooses the ranks."""

from __future__ import annotations
