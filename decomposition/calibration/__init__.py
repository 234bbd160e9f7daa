"""Calibration: what the inputs of layers, and the network's outputs, say about weights."""
