"""The data as a model gets them."""
