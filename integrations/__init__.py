"""How existing applications use Handrail: one package for each web framework."""
