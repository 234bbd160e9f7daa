"""Run work in worker processes, on this machine or on a Ray cluster."""
