"""What tests and benchmarks of Handrail, and of what is built on it, can use."""
