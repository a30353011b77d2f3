"""A run on disk: its folder, manifest, responses and logs, read by everything that looks at finished work."""
