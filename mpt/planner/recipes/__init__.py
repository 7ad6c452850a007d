"""The search for settings that fit: dials, recipes, patches, scaling."""
