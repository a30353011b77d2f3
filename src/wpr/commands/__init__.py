"""Commands of `wpr` in files of their own: they read options, call the layers below, and print."""
