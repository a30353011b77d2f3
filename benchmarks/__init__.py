"""Measurements side by side with other projects; `make bench` runs them."""
