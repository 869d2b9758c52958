"""How is a model asked? One narrow streaming interface, normalised events, scripted models."""
