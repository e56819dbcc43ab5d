"""Mesh shapes said beforehand. Knows models as numbers, described devices and traffic; starts no engine."""
