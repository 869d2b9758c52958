"""What is true? Tables, migrations, statements, leases, the effect protocol, the intent lock,
the trace.
"""
