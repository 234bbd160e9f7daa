"""Networks as searches, budgets and reports see them: PyTorch modules and ONNX graphs by one protocol."""
