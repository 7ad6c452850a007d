"""Where two trainings part, and why."""
