"""Built-in kernels, one folder each; a built-in is a plugin like anybody's. This file stays inert."""
