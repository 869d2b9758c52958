"""What a web process needs of a fleet, without any agent code."""
