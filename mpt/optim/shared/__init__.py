"""Used by several optimizers: groups, schedules, averages."""
