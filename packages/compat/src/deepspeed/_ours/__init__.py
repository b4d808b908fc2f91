"""What the names of the facade are: adapters between upstream's signatures and the ds packages."""
