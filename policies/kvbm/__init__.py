"""The KV block manager: which blocks lie in host memory, on disk and in shared stores, and what moves them.

Everything here is decided in runs of blocks, by content (`policies.cluster.blocks`), and nothing here moves a byte: the
world does, and says how it went. The device tier stays the engine's own.
"""
