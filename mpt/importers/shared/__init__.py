"""Used by all importers: reading of foreign settings, their translation with its origins, words of the command line."""
