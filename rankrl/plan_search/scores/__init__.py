"""Scores of plans, measured on held-out inputs."""
