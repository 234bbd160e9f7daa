"""Estimate second moments of layer inputs and sensitivities of layer outputs from calibration data."""
