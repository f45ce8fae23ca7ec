"""What configurations of families that see have in common."""
