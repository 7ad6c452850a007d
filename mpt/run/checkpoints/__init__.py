"""Checkpoints: payloads, manifests, shards, retention, background saves."""
