"""Stable forms of numerically poor expressions."""
