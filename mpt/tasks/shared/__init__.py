"""Used by several tasks."""
