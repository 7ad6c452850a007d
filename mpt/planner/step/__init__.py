"""Planned steps: on one device, on ranks, sharded, compiled."""
