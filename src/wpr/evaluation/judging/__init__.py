"""Judges: asking models, reward models and functions which of two responses is better, or how good one is."""
