"""What changes the numbers or the messages of a run, each at an extension point that the rest of the package offers."""
