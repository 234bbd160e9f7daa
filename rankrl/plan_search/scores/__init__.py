"""Scores: what a plan is worth, measured on held-out inputs."""
