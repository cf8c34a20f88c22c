"""④⑤ What models are built of: layers that hold their rank's share of each parameter."""
