"""Runs what the scheduler decided: the only place with device state."""
