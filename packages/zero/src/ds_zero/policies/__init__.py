"""What changes the numbers or the messages of a run, each at a seat that the rest of the package offers."""
