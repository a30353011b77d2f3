"""Recipe files: reading, merging, typed settings."""
