"""Speculation (decision 048): that it changes no token, and what it gains."""
