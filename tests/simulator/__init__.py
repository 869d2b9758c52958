"""The simulator: the real step, ledger, sweep and machine under a seeded scheduler.

One seed is one schedule: a few runs, workers, sweepers and people whose calls interleave in any
order, on a virtual clock, with faults at their ports. After each, the fake service's own records
are held against what the ledger says. `python -m tests.simulator --seed N --explain` tells one.
"""
