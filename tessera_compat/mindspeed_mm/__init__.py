"""Offer the surface of MindSpeed-MM: flags, job files, classes and the training entry."""
