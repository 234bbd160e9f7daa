"""Candidates: what may become of every layer, and the library of their fits."""
