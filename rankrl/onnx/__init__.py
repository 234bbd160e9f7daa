"""ONNX: `export` writes files, `graph` reads and rewrites those of others, `runtimes` run them."""
