"""Commands of `wpr`, one file each; `wpr.cli` registers them."""
