"""Used by several networks."""
