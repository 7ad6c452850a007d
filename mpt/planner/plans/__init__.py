"""The plan as data: of training, of inference, of several processes."""
