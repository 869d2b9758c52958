"""The history of the ledger's schema. A released revision is never edited: write the next one."""
