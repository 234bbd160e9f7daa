"""Export modules to ONNX (`export`), compress ONNX graphs (`graph`), run ONNX files (`runtimes`)."""
