"""`make torture`: faults done to a real server under real load, and what its clients saw.
Knows nothing of the server's insides but its processes, which it kills, and its metrics, which it reads."""
