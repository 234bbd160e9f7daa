"""Prune a network to a target fraction of its parameters or MACs."""
