"""Rewriting layers as equivalent ones that can be compressed, before a plan is made."""
