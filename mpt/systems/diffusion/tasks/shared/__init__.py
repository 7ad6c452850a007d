"""Sampling and evaluation for the task."""
