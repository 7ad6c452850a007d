"""Used by all importers: reading of foreign settings, and their translation with its origins."""
