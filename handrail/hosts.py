"""How a run is accepted inside a host's own transaction."""
