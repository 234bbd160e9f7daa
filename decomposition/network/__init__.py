"""Inspect networks (layers, cost, inputs, outputs), rewrite their layers, and simulate integers in them."""
