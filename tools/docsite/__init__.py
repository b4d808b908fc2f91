"""What makes the documentation site: pages made at build time, their pictures, and the checks of `nox -s docs`."""
