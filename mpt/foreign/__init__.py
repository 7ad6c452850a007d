"""Bounded readers of what mpt did not write, or cannot know that it did: files, and pickles without unpickling."""
