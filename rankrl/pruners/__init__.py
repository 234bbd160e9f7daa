"""Pruning a network to a target."""
