"""Handrail inside a Celery app that exists already."""
