"""The layers of the two-camera detector."""
