"""The simulated world: SimPy carries out what the policies order, against simulated engines, on one virtual clock."""
