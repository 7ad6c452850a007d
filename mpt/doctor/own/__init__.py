"""The doctor for training steps that know nothing of mpt."""
