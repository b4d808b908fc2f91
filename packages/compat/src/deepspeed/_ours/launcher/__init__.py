"""Programs of the shell, hosts, elasticity."""
