"""Fits: weights written as small cores, and layers brought to answer as the dense ones do."""
