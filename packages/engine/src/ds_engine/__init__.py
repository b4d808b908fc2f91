"""The meta-package: Config -> Plan -> Engine."""
