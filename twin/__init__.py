"""The twin: step-latency models, one simulated engine, the simulated world, and the `twin` command."""

__version__ = "0.1.0"
