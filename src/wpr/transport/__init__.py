"""Optimal transport between next-token distributions: pure tensor mathematics, without language models or trainers."""
