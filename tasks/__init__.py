"""What does a worker do? The step shell and its peers: load, ask the machine, execute, commit,
publish.
"""
