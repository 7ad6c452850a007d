"""Recording an update as CUDA graphs: whether it is the same each time, and the graphs."""
