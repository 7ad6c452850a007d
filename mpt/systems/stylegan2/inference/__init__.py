"""Pictures and videos from generators."""
