"""The crash sweep: a process is killed at every durable write and every call, and what it left
behind must come to a good end.

`points` names the places and what of the plan they cover, `outside` is everything that survives a
process, `bench` a fleet whose every call passes a port, `scenarios` what it does, `child` the
process that dies, `recovery` the one that goes on, `checks` what must hold afterwards. Run it with
`python -m tests.crash`.
"""
