"""Calibration from live runs: times of requests in, a `linear` latency model of each worker group out."""
