"""Handrail in a Flask application."""
