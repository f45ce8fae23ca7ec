"""What families that see have in common: their configurations, and how they are dealt out."""
