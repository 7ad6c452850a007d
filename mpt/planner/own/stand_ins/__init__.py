"""What stands in for things of torch and of libraries that fake tensors cannot be put through as they are."""
