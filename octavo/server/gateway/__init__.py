"""Several models on one port: a server for each model behind one address (decision 056)."""
