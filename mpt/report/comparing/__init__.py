"""Several modes side by side: their costs, and whether one is as good as another."""
