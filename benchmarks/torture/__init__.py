"""`make torture`: inject faults into a real server under real load and check what its clients see.
Of the server's insides it uses the processes, which it kills, and the metrics, which it reads."""
