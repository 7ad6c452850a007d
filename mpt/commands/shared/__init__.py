"""Used by several commands."""
