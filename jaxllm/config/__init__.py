"""The configuration a user gives. Imports nothing of the engine."""
