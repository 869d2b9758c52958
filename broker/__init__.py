"""How work travels: a Celery app with safe settings, one message, one pool, one way to publish.

Nothing in here is a memory or a clock. A message is a hint that a row may be due; it may be lost,
doubled, delayed or forged without harm, because the claim in the ledger decides and records.
"""
