"""NVIDIA's network pickles: read, and written back."""
