"""Frames of video files, read and written."""
