"""The common part of this package's commands."""
