"""Handrail in a Django project."""
