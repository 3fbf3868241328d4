"""Decisions, written once: routing, planning, KV placement and resilience as pure policies.

Nothing in here reads a clock, draws a random number it was not handed, or does I/O.
"""
