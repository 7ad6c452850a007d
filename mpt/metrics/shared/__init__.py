"""Used by several metrics."""
