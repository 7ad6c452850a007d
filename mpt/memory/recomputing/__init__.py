"""Activation checkpointing: which blocks, which operators, and the replay."""
