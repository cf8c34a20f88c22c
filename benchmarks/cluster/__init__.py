"""What a fleet's router costs and gains: decisions, memory, the feed of a replica, hit rates on a trace."""
