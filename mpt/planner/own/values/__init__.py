"""What a step is answered where it reads values, which fake tensors do not have."""
