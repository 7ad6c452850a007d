"""Losses and their choice, used by tasks."""
