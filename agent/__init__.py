"""What may a run do next? The pure core: values in, values out; no I/O, no clock, no Celery."""
