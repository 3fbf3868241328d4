"""What is loaded into vLLM's own processes, and into no other of ours: KV tiers that our policies decide about.

`books` knows no vLLM and can be imported anywhere; the other files import vLLM and torch, and only vLLM imports them,
by way of `path/dynatwin_vllm.py`.
"""
