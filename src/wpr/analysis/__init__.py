"""Analyses of finished runs and of regularizers: one file each, with `analyze(context, ...)`; see `context`."""
