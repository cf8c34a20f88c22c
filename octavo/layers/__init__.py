"""④⑤ What models are built of: layers that know how to hold their rank's share of a parameter."""
