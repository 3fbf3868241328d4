"""One simulated engine, pure: block pool, schedulers, step plan and commit. No clock, no I/O, no chance."""
