"""How is doubt resolved? Sweeps, queries, and what their answers prove."""
