"""A recipe's stages, the run folder, resuming."""
