"""Chaos on the real stack: worker processes, beats, Valkey, PostgreSQL and a provider, at work
under a nemesis; then peace, and every promise is held against the provider's own records.

`python -m tests.chaos`, or `make chaos MINUTES=5`; docs/how-it-is-tested.md says what it shows.
"""
