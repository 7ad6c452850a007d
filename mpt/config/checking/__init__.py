"""The check of a configuration's tree."""
