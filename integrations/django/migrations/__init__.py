"""The ledger's tables as migrations of a Django project: each runs one revision of the ledger's."""
