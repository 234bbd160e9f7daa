"""Verify compressed networks: compare outputs with the original's, export, score and certify."""
