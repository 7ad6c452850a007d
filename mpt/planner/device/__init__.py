"""The fake device: fake tensors that follow a GPU's routes, results without computing."""
