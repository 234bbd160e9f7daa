"""Fit cores to weights, refit layers to the inputs they receive, and round weights to integers."""
