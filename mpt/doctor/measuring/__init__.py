"""One step, taken for real and watched."""
