"""What the names of the facade are: adapters between upstream's signatures and the ds packages.

Which of a module's names are public the table says (`deepspeed._surface`), so that no module here has an `__all__`.
"""
