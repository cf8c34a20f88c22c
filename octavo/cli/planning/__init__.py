"""`octavo plan`: capacity before machines are bought. plan/ has the simulation; here are the flags, the measuring, and what is printed."""
