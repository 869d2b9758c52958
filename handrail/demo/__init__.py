"""The refund demo: a small shop, a payment provider in its own process, and a planner by rule.

Customers write that they were charged twice. `app` is the workflow, and what to read first.
`messages.jsonl` holds the mails and how each must end, `shop` and `provider` are the outside world,
`planner` plays the model, and `rules` is what the program finds in the shop's records, whatever the
planner says. `show` performs it all: `handrail demo`.
"""
