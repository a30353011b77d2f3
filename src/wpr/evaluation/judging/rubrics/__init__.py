"""Rubrics that ship with the package: what a judge is told, one file each."""
