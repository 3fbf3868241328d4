"""The twin beside a live cluster, in a process of its own: the same requests, simulated as their lengths become known.

`facts` is what the live side tells and hears, `ahead` the simulation, `process` what runs it. The live side imports
`facts` and `pipe` alone.
"""
