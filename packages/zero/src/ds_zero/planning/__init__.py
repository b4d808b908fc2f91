"""The plan of units: what travels together, where it lies and how many bytes that is. Pure; it asks the tiers of offloading what they hold."""
