"""What `rankrl task=NAME` can do; the only code that sees the configuration."""
