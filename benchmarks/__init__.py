"""What Handrail costs, measured; see `docs/what-a-step-costs.md`. No part of the package, and
of no test.
"""
