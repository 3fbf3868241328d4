"""Step latency and memory: how long one engine step takes, and how much KV fits. Pure; knows nothing of queues."""
