"""pytest fixtures for authors of kernels. Loads neither torch nor plotly: every pytest run in the environment imports it."""
