"""The worker's side of planning: the process that builds and traces."""
