"""Planning capacity: the real scheduler, page cache, router and queue limit on a virtual clock, with step times from a cost model
(decision 055)."""
