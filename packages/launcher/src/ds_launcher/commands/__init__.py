"""The commands that ds-launcher brings itself."""
