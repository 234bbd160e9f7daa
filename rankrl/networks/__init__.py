"""Adapt PyTorch modules and ONNX graphs to one protocol for searches, budgets and reports."""
