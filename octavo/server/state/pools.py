"""Threads for work on files, by kind: much work of one kind does not keep another waiting."""

from octavo.server.threads import Pool

FILES = Pool("files", num_threads=4, max_waiting=1024)
"""Reads and writes files and batches for the requests that ask for them."""
BATCHES = Pool("batches", num_threads=4, max_waiting=1024)
"""Reads and writes files and batches for running batches."""
MAX_WAITING_ADAPTERS = 64
ADAPTERS = Pool("adapters", num_threads=1, max_waiting=MAX_WAITING_ADAPTERS)
"""Asks the process that reads the headers of adapters, one at a time (weights/adapters/reader_process.py), and writes down what is loaded."""
