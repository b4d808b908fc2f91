"""What each unit is, decided before anything is allocated."""
