"""Distances between distributions of images, and the features they are measured in."""
