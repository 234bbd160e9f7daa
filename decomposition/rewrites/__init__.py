"""Layers rewritten as equal ones that can be compressed, before anything is chosen."""
