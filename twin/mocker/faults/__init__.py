"""Performs scenarios on the simulated world: `script` plays one, a module for each family of faults does them."""
